"""The scheduler's state of a live request: a group, and one sequence per unfinished choice.

A group changes only by its own methods, the transitions of its life. The allocator alone writes a sequence's page table
and its counts of computed tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from operator import add
from typing import Literal

from quire_engine.contract.batch import PENDING, POOLED_BITS
from quire_engine.contract.invariants import require
from quire_engine.contract.types import (
    GenerationRequest,
    HoldReason,
    Pooling,
    SamplingParams,
    TokenLogprobs,
    WaitReason,
)
from quire_engine.scheduling.account import Account
from quire_engine.scheduling.beams import BeamSearch
from quire_engine.scheduling.blocks import Row, SequenceKV

# The hash of a full block; for a partial one the hash of all blocks before it, and its first tokens.
Content = bytes | tuple[bytes, tuple[int, ...]]
GroupState = Literal["waiting", "running", "preempted", "held", "finished"]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice: its tokens, the number of them that are computed, and the blocks that hold those."""

    sequence_id: int
    choice: int
    group: Group
    own_token_ids: list[int]  # without those that only its row has
    num_prompt_tokens: int
    kv: SequenceKV  # written by the allocator alone
    has_output: bool = False  # this engine process has sent its first output
    num_forced: int = 0  # tokens after the last sampled one that its grammar or thinking limit forced
    expected_output: int = 0  # its output tokens in all, as expected when it last was; 0: no expectation yet
    is_launched: bool = False  # all of its tokens are computed or in flight: nothing is left to schedule
    row: Row | None = None  # then `kv` too: where its counts and newest tokens are while it does nothing but decode

    @property
    def token_ids(self) -> list[int]:
        """Prompt, then output; PENDING for those of steps in flight."""
        return self.own_token_ids if self.row is None else self.row.known(self.own_token_ids)

    @property
    def num_known(self) -> int:
        """The number of its tokens, pending ones included."""
        return len(self.own_token_ids) if self.row is None else self.row.num_computed + 1

    @property
    def num_output_tokens(self) -> int:
        return self.num_known - self.num_prompt_tokens

    def take_row(self, row: Row) -> None:
        """Read the sequence's counts and newest tokens from a row from now on."""
        self.row = self.kv = row

    def leave_row(self) -> None:
        """Give the sequence its own tokens and counts again."""
        if self.row is not None:
            self.row.known(self.own_token_ids)
            self.kv = self.row.alone()
            self.row = None

    def note_output(self) -> None:
        self.has_output = True

    def expect(self, num_output_tokens: int) -> None:
        """Set how many output tokens are expected in all."""
        self.expected_output = num_output_tokens

    def note_forced(self, num_tokens: int) -> None:
        """Record forced tokens after a sampled one; the next step computes them together with it."""
        self.num_forced = num_tokens

    def forget_pending(self) -> None:
        """The tokens in flight for it will be dropped: it is to be scheduled again."""
        self.num_forced = 0
        while self.own_token_ids[-1] == PENDING:
            self.own_token_ids.pop()
        self.is_launched = False

    def extend_beam(self, past: Iterable[int], token_id: int) -> None:
        """Continue a beam's tokens `past` with `token_id`, which is to be computed next."""
        self.own_token_ids = [*past, token_id]
        self.is_launched = False

    @property
    def blocks_for_known(self) -> int:
        """Blocks that hold every known token."""
        return self.kv.table.num_blocks_for(self.num_known)

    def window_growth(self, num_tokens: int) -> int:
        """Blocks beyond those it holds, or enters with, that windows will need after `num_tokens` further tokens."""
        known, growth = self.num_known, 0
        for table in self.kv.tables:
            if table.group.window is not None:
                held = table.num_held or table.num_blocks_for(table.group.entry_end(0, known))
                growth += max(table.group.settled_blocks(known + num_tokens, table.block_size) - held, 0)
        return growth

    @property
    def num_spare_slots(self) -> int:
        """Token slots without a known token in the last one of its blocks; without blocks, of those that it needs."""
        table = self.kv.table
        return (table.num_slots or self.blocks_for_known * table.block_size) - self.num_known


Promise = tuple[Content, Sequence]  # a block's content, and the sequence that is computing it


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """One request: the unit of admission, preemption and waiting.

    A group waits first, then runs and is preempted in turns until its last choice ends. When it runs, its leader
    computes the prompt once for all choices; after `share_prompt` every choice computes.
    """

    request: GenerationRequest
    arrival: int  # position in the order of submission; kept for life
    added_step: int
    sequences: list[Sequence] = field(default_factory=list)  # unfinished choices
    computing: list[Sequence] = field(default_factory=list)  # the sequences that get slices now; none while waiting
    prompt_shared: bool = True  # False: the leader computes the prompt, the other choices wait for its blocks
    state: GroupState = "waiting"
    work: int = 0  # steps it needs at most as the elder
    wait_bound: int = 0  # steps from submission to its end, at most
    footprint: int = 0  # blocks that it holds at most
    num_bypasses: int = 0
    wait_reason: WaitReason = "budget"
    held_for: HoldReason = "client"  # while it is held
    awaited: Promise | None = None  # a prefix that another sequence is computing and the group waits for
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_class_preemptions: int = 0  # preemptions in favour of interactive groups
    num_computed_before: int = 0  # tokens that a choice had computed when the group was last preempted
    num_starved: int = 0  # preemptions after a step without device memory, or with a non-finite value
    account: Account | None = None  # of its tenant, or under fair queueing of its size class, if one is kept
    num_uncharged: int = 0  # tokens at the end of its prompt that are not charged yet
    entered_at: float = 0.0  # when it last began to run
    first_scheduled: float | None = None
    first_token: float | None = None
    kv_wait_seconds: float = 0.0
    prompt_logprobs_due: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: PooledPrompt | None = field(init=False)  # None: the request is for tokens
    beams: BeamSearch | None = field(init=False)  # with it the sequences are live beams; without it they are choices
    # Copied from the request, because they are read for every sequence in every step:
    num_prompt_tokens: int = field(init=False)
    max_new_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    reads_output: bool = field(init=False)
    sampling: SamplingParams = field(init=False)
    is_batch: bool = field(init=False)
    is_resumed: bool = field(init=False)  # an earlier engine has begun it: its client has tokens already
    adapter: str = field(init=False)  # its digest, or empty
    is_plain: bool = field(init=False)  # its decodes may have rows

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_new_tokens = request.stop.max_new_tokens
        self.stop_token_ids = frozenset(request.stop.stop_token_ids)
        self.beams = None if request.beam is None else BeamSearch(request, request.beam)
        self.reads_output = request.sampling.reads_output or self.beams is not None  # the host chooses the beams
        self.sampling = request.sampling if self.beams is None else self.beams.sampling
        self.is_batch = request.service_class == "batch"
        self.is_resumed = any(request.resumed_token_ids)
        self.adapter = "" if request.adapter is None else request.adapter.digest
        self.pooled = PooledPrompt(request.pooling) if request.pooling else None
        self.is_plain = _is_plain(request)

    @property
    def reads_cache(self) -> bool:
        """Whether a cached prefix may be used: prompt scores and mean pooling need every row computed."""
        return self.request.sampling.num_prompt_logprobs is None and self.request.pooling != "mean"

    @property
    def side(self) -> tuple[Account | None, bool]:
        """The account and the service class: prompts of one side compete for being begun."""
        return self.account, self.is_batch

    @property
    def payer(self) -> Account | None:
        """The account of its tenant, if one is kept."""
        return None if self.account is None else self.account.payer

    def pending(self, sequence: Sequence) -> int:
        """Tokens that a computing sequence, or a waiting group's leader, can compute now; 1 is a decode.

        The leader stops at the end of the prompt while other choices wait for it, so that they share the blocks of the
        prompt and nothing else.
        """
        target = sequence.num_known if self.prompt_shared else sequence.num_prompt_tokens
        return target - sequence.kv.num_computed

    @property
    def is_swapped(self) -> bool:
        """Whether a part of its computed blocks was swapped out."""
        return any(sequence.kv.swapped is not None for sequence in self.sequences)

    @property
    def returns_behind(self) -> bool:
        """Whether a choice other than the leader will have more than one token to compute after the swap-in."""
        others = (s for s in self.sequences if s is not self.leader)
        return any(s.kv.swapped is not None and s.num_known > s.kv.swapped.num_tokens + 1 for s in others)

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt for all, until it is shared.

        It is a choice without output, if there is one. The first output token of every such choice is then sampled from
        the leader's last row, and the other choices are forked at the end of the prompt.
        """
        if len(self.sequences) == 1:
            return self.sequences[0]
        return next((s for s in self.sequences if s.num_output_tokens == 0), self.sequences[0])

    @property
    def num_held_blocks(self) -> int:
        """About the blocks that its preemption would free: without its cached prefix, and a common prompt once."""
        tables = self.leader.kv.tables
        size, others = tables[0].block_size, len(self.sequences) - 1
        full, cached = self.num_prompt_tokens // size if self.prompt_shared else 0, self.num_cached_tokens // size
        kept = sum([max(full - table.num_passed, 0) * others + max(cached - table.num_passed, 0) for table in tables])
        return max(sum([sequence.kv.num_held for sequence in self.sequences]) - kept, 0)

    def followers(self) -> list[Sequence]:
        """The sequences that wait for the leader's prompt."""
        leader = self.leader
        return [] if self.prompt_shared else [s for s in self.sequences if s is not leader]

    @property
    def is_prefilling(self) -> bool:
        """Whether a sequence has prompt tokens left to compute, between steps; forced tokens count as a decode."""
        return not self.prompt_shared or any(self.pending(s) > 1 + s.num_forced for s in self.computing)

    def blocks_beside_leader(self) -> int:
        """Blocks that the other choices need for their known tokens, beyond the prompt's full blocks."""
        if self.prompt_shared:  # swapped groups: the leader's cost has all
            return 0
        leader = self.leader
        size = leader.kv.table.block_size
        shared = self.num_prompt_tokens // size
        return sum(
            min(s.blocks_for_known - shared, table.group.most_blocks(s.num_known, size))
            for s in self.sequences
            if s is not leader
            for table in s.kv.tables
        )

    # ---- transitions ----------------------------------------------------------------------------------------------

    def add_choice(self, sequence: Sequence) -> None:
        """Add a choice to a group that has not run."""
        self.sequences.append(sequence)
        self.prompt_shared = len(self.sequences) == 1

    def charge_to(self, account: Account | None) -> None:
        """Charge the group's tokens to this account."""
        self.account = account

    def wait_for(self, reason: WaitReason) -> None:
        """The group did not enter in this step, for this reason."""
        self.wait_reason = reason

    def wait_for_promise(self, promise: Promise | None) -> None:
        """Set or clear the prefix that the group waits for."""
        self.awaited = promise

    def note_starved(self) -> None:
        """The device had no memory for its slice, or computed a non-finite value."""
        self.num_starved += 1

    def note_charged(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the prompt are charged, or were cached."""
        self.num_uncharged = self.num_prompt_tokens - num_tokens

    def note_class_preemption(self) -> None:
        self.num_class_preemptions += 1

    def note_bypass(self) -> None:
        """A group behind it in the queue entered, and it could not."""
        self.num_bypasses += 1

    def note_kv_wait(self, seconds: float) -> None:
        """Add seconds for which the group waited for blocks at the queue's head."""
        self.kv_wait_seconds += seconds

    def enter(self, now: float) -> None:
        """Run: the leader has its blocks, perhaps with a cached prefix, and computes the prompt for all choices."""
        require(self.state in {"waiting", "preempted"}, f"a group that is {self.state} enters")
        leader = self.leader
        self.state = "running"
        self.entered_at = now
        self.computing = list(self.sequences) if self.prompt_shared else [leader]
        if self.first_scheduled is None:
            self.first_scheduled = now
            self.num_cached_tokens = min(leader.kv.num_computed, leader.num_prompt_tokens)

    def share_prompt(self) -> None:
        """The leader has computed the prompt, or it is in flight: now every unfinished choice computes."""
        self.computing = list(self.sequences)
        self.prompt_shared = True

    def launch(self, sequence: Sequence, *, samples: bool) -> None:
        """The sequence's known tokens are computed or in flight; with `samples` its next token is in flight too.

        A beam waits until all beams of the search have come that far.
        """
        if samples:
            sequence.own_token_ids.append(PENDING)
        if self.beams is not None or len(sequence.own_token_ids) == self.num_prompt_tokens + self.max_new_tokens:
            self.note_launched(sequence)

    def note_launched(self, sequence: Sequence) -> None:
        """Nothing of the sequence is left to schedule, for now or at all."""
        sequence.is_launched = True
        self.computing.remove(sequence)

    def resume_beams(self) -> None:
        """All beams have their next token and compute again."""
        self.computing = list(self.sequences)

    def note_first_token(self, now: float) -> None:
        """Note that the first token came, or the end of a prompt that wants none."""
        self.first_token = now

    def add_prompt_logprobs(self, scores: Iterable[TokenLogprobs]) -> None:
        """Append the next scores of the prompt."""
        self.prompt_logprobs.extend(scores)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """The scores of the whole prompt, which are sent once; the first token has none."""
        self.prompt_logprobs_due = False
        return (None, *self.prompt_logprobs)

    def preempt(self) -> None:
        """Wait again, with everything computed lost; the caller frees the blocks."""
        self._stop()
        self.forget_pending()
        self._lose(s.kv.num_computed for s in self.sequences)

    def lose_swapped(self) -> None:
        """Wait for a swap no longer, but for everything to be computed again; the caller drops the blocks."""
        self._lose(s.kv.swapped.num_tokens for s in self.sequences if s.kv.swapped is not None)

    def _lose(self, num_computed: Iterable[int]) -> None:
        self.num_computed_before = max(self.num_computed_before, *num_computed)
        self.prompt_shared = len(self.sequences) == 1
        self.prompt_logprobs.clear()
        if self.pooled is not None:
            self.pooled.clear()

    def forget_pending(self) -> None:
        """The tokens in flight for its sequences will be dropped."""
        for sequence in self.sequences:
            sequence.forget_pending()

    def preempt_swapped(self, *, prompt_shared: bool) -> None:
        """Wait again, with the computed blocks swapped out of the pool."""
        self._stop()
        self.prompt_shared = prompt_shared

    def _stop(self) -> None:
        require(self.state == "running", f"a group that is {self.state} is preempted")
        self.state, self.computing = "preempted", []
        if self.beams is not None:
            self.beams.forget_step()
        self.num_preemptions += 1

    def hold(self, reason: HoldReason) -> None:
        """Leave the queues until the release."""
        self.state, self.awaited, self.held_for = "held", None, reason

    def release(self, step: int, wait_bound: int) -> None:
        """Wait again, as if submitted now."""
        self.state = "preempted" if self.num_preemptions else "waiting"
        self.added_step, self.wait_bound = step, wait_bound

    def end(self, sequence: Sequence) -> bool:
        """End a choice; True if it was the group's last."""
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


MOST_STOP_IDS = 8  # of a plain request


def _is_plain(request: GenerationRequest) -> bool:
    """Whether its decodes may have rows: one choice of tokens without rules, log-probabilities or an adapter."""
    sampling = request.sampling
    is_single = request.num_sequences == 1 and request.beam is None and request.adapter is None
    has_rules = sampling.reads_output or sampling.logit_bias or sampling.allowed_token_ids or sampling.banned_token_ids
    is_told = sampling.num_logprobs is None and sampling.num_prompt_logprobs is None
    is_text = request.stop.max_new_tokens > 0 and len(request.stop.stop_token_ids) <= MOST_STOP_IDS
    return is_single and is_text and is_told and not has_rules and not sampling.min_tokens and not request.pooling


class PooledPrompt:
    """The embedding of a prompt: sums its rows while they are computed, and returns their mean.

    The sums are of whole numbers and so exact: the vector does not depend on how the prompt was cut into slices. After
    a preemption the sums begin again.
    """

    __slots__ = ("_pooling", "_sums")

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sums: list[int] = []

    def add(self, sums: Values[int]) -> None:
        """Add the sums over the next slice's rows."""
        self._sums = list(map(add, self._sums, sums)) if self._sums else list(sums)

    def clear(self) -> None:
        """The computed rows are lost."""
        self._sums = []

    def vector(self, num_tokens: int) -> tuple[float, ...]:
        """The mean of the added rows, for a prompt of `num_tokens` tokens."""
        units = (num_tokens if self._pooling == "mean" else 1) << POOLED_BITS
        return tuple([value / units for value in self._sums])
