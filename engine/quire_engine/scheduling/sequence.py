"""What the scheduler knows about a live request: a group, and one sequence per unfinished choice.

A group changes only by its own methods, the transitions of its life; a sequence's tables and counts of computed tokens
are written by the allocator alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from operator import add
from typing import Literal

from quire_engine.batch import PENDING, POOLED_BITS
from quire_engine.invariants import require
from quire_engine.scheduling.account import Account
from quire_engine.scheduling.beams import BeamSearch
from quire_engine.scheduling.blocks import SequenceKV
from quire_engine.types import GenerationRequest, Pooling, SamplingParams, TokenLogprobs, WaitReason

Content = bytes | tuple[bytes, tuple[int, ...]]  # of a block: its hash, or what is before it and how it begins
GroupState = Literal["waiting", "running", "preempted", "held", "finished"]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice: its tokens, how many of them are computed, and the blocks that hold those."""

    sequence_id: int
    choice: int
    group: Group
    token_ids: list[int]  # prompt, then output; PENDING for those of steps in flight
    num_prompt_tokens: int
    kv: SequenceKV  # written by the allocator alone
    has_output: bool = False  # its first output was sent in this engine's life
    num_forced: int = 0  # known tokens behind the last sampled one: its executor knew that they had to come
    is_launched: bool = False  # all of its tokens are computed, or in flight: nothing is left to schedule

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def note_output(self) -> None:
        """Its first output is sent."""
        self.has_output = True

    def note_forced(self, num_tokens: int) -> None:
        """So many tokens came behind a sampled one: the next step computes them beside that one."""
        self.num_forced = num_tokens

    def forget_pending(self) -> None:
        """Whatever is in flight for it will not be taken: it is to be scheduled again."""
        self.num_forced = 0
        while self.token_ids[-1] == PENDING:
            self.token_ids.pop()
        self.is_launched = False

    def go_on(self, past: Iterable[int], token_id: int) -> None:
        """As a beam: what it knows is `past` and one token more, which is to be computed."""
        self.token_ids = [*past, token_id]
        self.is_launched = False

    @property
    def blocks_for_known(self) -> int:
        """Blocks that hold every token known now."""
        return self.kv.table.num_blocks_for(len(self.token_ids))


Promise = tuple[Content, Sequence]  # a block, and who will have computed it


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """One request: the unit of admission, preemption and waiting.

    It waits, and then runs and is preempted in turns until its last choice ends. Running, it first computes the prompt
    once, by its leader; then `share_prompt` lets every choice compute.
    """

    request: GenerationRequest
    arrival: int  # position in the order of submission; kept for life
    added_step: int
    sequences: list[Sequence] = field(default_factory=list)  # unfinished choices
    computing: list[Sequence] = field(default_factory=list)  # of those, the ones that get slices now; none if waiting
    prompt_shared: bool = True  # False: the leader (is to) compute the prompt, the others wait for its blocks
    state: GroupState = "waiting"
    work: int = 0  # steps it needs at most as the elder
    wait_bound: int = 0  # steps from submission to its end, at most
    num_bypasses: int = 0
    wait_reason: WaitReason = "budget"
    awaited: Promise | None = None  # what another computes of its prompt, while it is worth waiting for
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_class_preemptions: int = 0  # of its preemptions, those for interactive groups
    num_computed_before: int = 0  # tokens that a choice had computed when the group was last preempted
    num_starved: int = 0  # of its preemptions, those because it was not, or not rightly, computed in a step
    account: Account | None = None  # that it is charged to, where anyone counts
    num_uncharged: int = 0  # tokens at the end of its prompt that the account is still to be charged for
    entered_at: float = 0.0  # when it last began to run
    first_scheduled: float | None = None
    first_token: float | None = None
    kv_wait_seconds: float = 0.0
    prompt_logprobs_due: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: PooledPrompt | None = field(init=False)  # None: tokens are wanted
    beams: BeamSearch | None = field(init=False)  # its sequences are the live beams; None: they are the choices
    # Of the request, read for every sequence in every step:
    num_prompt_tokens: int = field(init=False)
    max_new_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    reads_output: bool = field(init=False)
    sampling: SamplingParams = field(init=False)
    is_batch: bool = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_new_tokens = request.stop.max_new_tokens
        self.stop_token_ids = frozenset(request.stop.stop_token_ids)
        self.beams = None if request.beam is None else BeamSearch(request, request.beam)
        self.reads_output = request.sampling.reads_output or self.beams is not None  # the host says who goes on
        self.sampling = request.sampling if self.beams is None else self.beams.sampling
        self.is_batch = request.service_class == "batch"
        self.pooled = PooledPrompt(request.pooling) if request.pooling else None

    @property
    def reads_cache(self) -> bool:
        """Scores of the prompt, and the mean of its rows, need every row of it computed."""
        return self.request.sampling.num_prompt_logprobs is None and self.request.pooling != "mean"

    @property
    def side(self) -> tuple[str, bool]:
        """Whose prompts compete for being begun: those of a class, and of a tenant where tenants are kept apart."""
        return "" if self.account is None else self.account.tenant, self.is_batch

    def pending(self, sequence: Sequence) -> int:
        """Tokens that a computing sequence, or a waiting group's leader, can compute now; 1 is a decode.

        The leader stops at the end of the prompt while others wait for it, so that they share whole blocks of
        prompt and nothing else.
        """
        target = len(sequence.token_ids) if self.prompt_shared else sequence.num_prompt_tokens
        return target - sequence.kv.num_computed

    @property
    def is_swapped(self) -> bool:
        """Whether it waits with something computed."""
        return any(sequence.kv.swapped is not None for sequence in self.sequences)

    @property
    def returns_behind(self) -> bool:
        """Whether a choice of a swapped group, beside its leader, will have more than its next token to compute."""
        others = (s for s in self.sequences if s is not self.leader)
        return any(s.kv.swapped is not None and len(s.token_ids) > s.kv.swapped.num_tokens + 1 for s in others)

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt for all, until it is shared.

        A choice without output leads if there is one: the token after the prompt is then sampled from the
        leader's last row for every such choice at once, and the others join behind the prompt.
        """
        return next((s for s in self.sequences if s.num_output_tokens == 0), self.sequences[0])

    def followers(self) -> list[Sequence]:
        """The sequences that wait for the leader's prompt."""
        leader = self.leader
        return [] if self.prompt_shared else [s for s in self.sequences if s is not leader]

    @property
    def is_prefilling(self) -> bool:
        """Between steps: in the middle of its known tokens. Those that had to come are a longer decode."""
        return not self.prompt_shared or any(self.pending(s) > 1 + s.num_forced for s in self.computing)

    def blocks_beside_leader(self) -> int:
        """Blocks that the other choices need for their known tokens, beyond the prompt's full blocks."""
        if self.prompt_shared:  # all of them were swapped, and come back together: they are counted with the leader's
            return 0
        leader = self.leader
        shared = self.num_prompt_tokens // leader.kv.table.block_size
        return sum(s.blocks_for_known - shared for s in self.sequences if s is not leader)

    # ---- transitions ----------------------------------------------------------------------------------------------

    def add_choice(self, sequence: Sequence) -> None:
        """One more choice of a group that has not run."""
        self.sequences.append(sequence)
        self.prompt_shared = len(self.sequences) == 1

    def wait_for(self, reason: WaitReason) -> None:
        """It did not enter in this step, and why."""
        self.wait_reason = reason

    def wait_for_promise(self, promise: Promise | None) -> None:
        """It waits until somebody else has computed this, or does not any more."""
        self.awaited = promise

    def note_starved(self) -> None:
        """The device had no memory for its slice, or what came of it was no number."""
        self.num_starved += 1

    def note_charged(self, num_tokens: int) -> None:
        """So many of the prompt's first tokens are paid for, or were cached."""
        self.num_uncharged = self.num_prompt_tokens - num_tokens

    def note_class_preemption(self) -> None:
        """It is about to be preempted for an interactive group."""
        self.num_class_preemptions += 1

    def be_bypassed(self) -> None:
        """A group behind it entered, and it could not."""
        self.num_bypasses += 1

    def note_kv_wait(self, seconds: float) -> None:
        """It was the queue's head for so long and found no blocks."""
        self.kv_wait_seconds += seconds

    def enter(self, now: float) -> None:
        """Run: the leader, which has its blocks and perhaps a cached prefix in them, computes for all."""
        require(self.state in {"waiting", "preempted"}, f"a group that is {self.state} enters")
        leader = self.leader
        self.state = "running"
        self.entered_at = now
        self.computing = list(self.sequences) if self.prompt_shared else [leader]
        if self.first_scheduled is None:
            self.first_scheduled = now
            self.num_cached_tokens = min(leader.kv.num_computed, leader.num_prompt_tokens)

    def share_prompt(self) -> None:
        """The leader has computed the prompt, or it is in flight: from now on every unfinished choice computes."""
        self.computing = list(self.sequences)
        self.prompt_shared = True

    def launch(self, sequence: Sequence, *, samples: bool) -> None:
        """All it knows is computed or in flight, and with `samples` its next token, of which the last is its end.

        A beam stands still until all of the search have come that far.
        """
        if samples:
            sequence.token_ids.append(PENDING)
        if self.beams is not None or len(sequence.token_ids) == self.num_prompt_tokens + self.max_new_tokens:
            sequence.is_launched = True
            self.computing.remove(sequence)

    def go_on(self) -> None:
        """Every beam has its next token."""
        self.computing = list(self.sequences)

    def note_first_token(self, now: float) -> None:
        """Its first token came, or the end of a prompt after which none is wanted."""
        self.first_token = now

    def add_prompt_logprobs(self, scores: Iterable[TokenLogprobs]) -> None:
        """The next scores of the prompt."""
        self.prompt_logprobs.extend(scores)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """The whole prompt's scores, to be sent once; the first token has none."""
        self.prompt_logprobs_due = False
        return (None, *self.prompt_logprobs)

    def preempt(self) -> None:
        """Wait again, with what was computed lost; the caller takes the blocks."""
        self.num_computed_before = max(self.num_computed_before, *(s.kv.num_computed for s in self.sequences))
        self._stop(prompt_shared=len(self.sequences) == 1)
        self.forget_pending()
        self.prompt_logprobs.clear()
        if self.pooled is not None:
            self.pooled.clear()

    def forget_pending(self) -> None:
        """Whatever is in flight for its sequences will not be taken."""
        for sequence in self.sequences:
            sequence.forget_pending()

    def set_aside(self, *, prompt_shared: bool) -> None:
        """Wait again, with what is computed kept outside of the pool."""
        self._stop(prompt_shared=prompt_shared)

    def _stop(self, *, prompt_shared: bool) -> None:
        require(self.state == "running", f"a group that is {self.state} is preempted")
        self.state, self.computing, self.prompt_shared = "preempted", [], prompt_shared
        if self.beams is not None:
            self.beams.forget_step()
        self.num_preemptions += 1

    def hold(self) -> None:
        """Wait for the release and nothing else."""
        self.state, self.awaited = "held", None

    def release(self, step: int, wait_bound: int) -> None:
        """Wait again, as if it were submitted now."""
        self.state = "preempted" if self.num_preemptions else "waiting"
        self.added_step, self.wait_bound = step, wait_bound

    def end(self, sequence: Sequence) -> bool:
        """A choice ends; True if the group does with it."""
        self.sequences.remove(sequence)
        if sequence in self.computing:
            self.computing.remove(sequence)
        if self.state != "running":
            self.prompt_shared = len(self.sequences) == 1
        if self.sequences:
            return False
        self.state = "finished"
        if self.account is not None and self.num_uncharged:
            self.account.forget(self.num_uncharged)
        return True


class PooledPrompt:
    """A prompt whose vector is wanted: the sum of its rows while they are computed, then their mean.

    The vector is the same however the prompt was cut into slices: the sums are of whole numbers, and exact. A prompt
    that is preempted begins again.
    """

    __slots__ = ("_pooling", "_sums")

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sums: list[int] = []

    def add(self, sums: Values[int]) -> None:
        """The next slice's."""
        self._sums = list(map(add, self._sums, sums)) if self._sums else list(sums)

    def clear(self) -> None:
        """Nothing is computed any more."""
        self._sums = []

    def vector(self, num_tokens: int) -> tuple[float, ...]:
        """The mean of the rows that were added, of a prompt of so many tokens."""
        units = (num_tokens if self._pooling == "mean" else 1) << POOLED_BITS
        return tuple([value / units for value in self._sums])
