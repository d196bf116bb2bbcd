"""One request's life as the step log keeps it: which phase it was in for how long, and what happened to it when.

Phases follow each other without a gap, so their seconds add up to the life's; the parts before the first token add up
to the time to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.types import FinishReason

# transit: from the arrival to the scheduler; queue: until it enters; prefill: until its first token; decode: until its
# end; preempted: until it enters again; recompute: until its next token; held: until its release; done: nothing more
# comes.
Phase = Literal["transit", "queue", "prefill", "decode", "preempted", "recompute", "held", "done"]
PreemptionMode = Literal["recompute", "swap"]
MOST_NOTES = 512  # chunks, preemptions and stalls that one life keeps each; beyond that they are counted only


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of the prompt, or of what was computed once and has to be again."""

    step: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """It lost its blocks: in which step, who needed them, how they come back."""

    step: int
    cause: str
    mode: PreemptionMode


@dataclass(frozen=True, slots=True)
class Stall:
    """Steps that ran without a token for a request that had its first one already."""

    first_step: int
    last_step: int
    seconds: float


@dataclass(slots=True)
class Spent:
    """Time in one phase for one reason."""

    seconds: float = 0.0
    steps: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class RequestLife:
    """What became of one request so far."""

    request_id: str
    arrived_at: float
    added_step: int  # the last step that was planned without it
    num_prompt_tokens: int
    max_new_tokens: int
    num_choices: int
    num_resumed_tokens: int  # output that an earlier engine process had made
    wait_bound: int
    group: Group | None  # None: it has ended
    told_at: int = 0  # its prompt's number among the contents
    phase: Phase = "transit"
    reason: str = ""  # of waiting
    spent: dict[tuple[Phase, str], Spent] = field(default_factory=dict)
    before_first_token: dict[tuple[Phase, str], Spent] | None = None  # the same, as it was then
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # of choices that have ended
    elder_step: int | None = None
    first_step: int | None = None
    first_token_step: int | None = None
    last_step: int | None = None
    finishes: dict[int, FinishReason] = field(default_factory=dict)  # by choice
    chunks: list[Chunk] = field(default_factory=list)
    num_chunks: int = 0
    preemptions: list[Preemption] = field(default_factory=list)
    num_preemptions: int = 0
    stalls: list[Stall] = field(default_factory=list)
    num_stalls: int = 0
    kv_wait_seconds: float = 0.0
    sequences: dict[int, Sequence] = field(default_factory=dict)  # unfinished choices
    sequence_ids: list[int] = field(default_factory=list)  # of all choices
    _since: float = 0.0
    _since_step: int = 0
    _stalled_at: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self._since, self._since_step = self.arrived_at, self.added_step

    @property
    def is_computing_prompt(self) -> bool:
        """Whether what is computed for it brings no token yet."""
        return self.phase in {"prefill", "recompute"}

    @property
    def has_ended(self) -> bool:
        return self.phase == "done"

    def spent_until(self, step: int, now: float) -> dict[tuple[Phase, str], Spent]:
        """The account with the phase that lasts, up to this moment."""
        account = {key: Spent(each.seconds, each.steps) for key, each in self.spent.items()}
        if not self.has_ended:
            current = account.setdefault((self.phase, self.reason), Spent())
            current.seconds += max(0.0, now - self._since)
            current.steps += step - self._since_step
        return account

    def wait(self, reason: str, step: int, now: float) -> None:
        """It stays out of this step, and why."""
        self._turn("preempted" if self.phase in {"preempted", "recompute"} else "queue", reason, step - 1, now)

    def enter(self, num_cached_tokens: int, step: int, now: float) -> None:
        """It runs from this step on; so many tokens of its prompt need not be computed."""
        if self.first_step is None:
            self.first_step, self.num_cached_tokens = step, num_cached_tokens
        self._turn("prefill" if self.first_token_step is None else "recompute", "", step - 1, now)

    def note_chunk(self, step: int, start: int, num_tokens: int) -> None:
        """A slice that is not a decode."""
        self.num_chunks += 1
        if len(self.chunks) < MOST_NOTES:
            self.chunks.append(Chunk(step, start, num_tokens))

    def go_on(self, step: int, now: float) -> None:
        """A token came where prompts were computed: its first, or the first after a preemption."""
        self._turn("decode", "", step, now)
        if self.first_token_step is None:
            self.first_token_step = step
            self.before_first_token = {key: Spent(each.seconds, each.steps) for key, each in self.spent.items()}
        if self._stalled_at is not None:
            first, since = self._stalled_at
            self._stalled_at = None
            self.num_stalls += 1
            if len(self.stalls) < MOST_NOTES:
                self.stalls.append(Stall(first, step - 1, now - since))

    def preempt(self, cause: str, step: int, now: float, *, mode: PreemptionMode) -> None:
        """It gives its blocks back and waits again."""
        if self.first_token_step is not None and self._stalled_at is None:
            self._stalled_at = step, now
        self.num_preemptions += 1
        if len(self.preemptions) < MOST_NOTES:
            self.preemptions.append(Preemption(step, cause, mode))
        self._turn("preempted", "", step - 1, now)

    def hold(self, step: int, now: float) -> None:
        """It is set aside after this step."""
        self._turn("held", "", step, now)

    def release(self, step: int, now: float, *, wait_bound: int) -> None:
        """After this step it waits again, and what it had is to be computed again or found."""
        self.wait_bound = step - self.added_step + wait_bound
        self._turn("queue" if self.first_step is None else "preempted", "", step, now)

    def end(self, choice: int, finish: FinishReason, num_tokens: int) -> None:
        """A choice ends; how many tokens it has said."""
        self.finishes[choice] = finish
        del self.sequences[choice]
        self.num_output_tokens += num_tokens

    def finish(self, step: int, now: float) -> None:
        """The last choice has ended; nothing of the request is kept but these numbers."""
        if self.group is not None:
            self.kv_wait_seconds = self.group.kv_wait_seconds
        self.last_step, self.group = step, None
        self.sequences.clear()
        self._turn("done", "", step, now)

    def _turn(self, phase: Phase, reason: str, step: int, now: float) -> None:
        """Close the account of the phase whose last step this was, and open the next one's."""
        spent = self.spent.setdefault((self.phase, self.reason), Spent())
        spent.seconds += max(0.0, now - self._since)
        spent.steps += step - self._since_step
        self.phase, self.reason, self._since_step = phase, reason, step
        self._since = max(now, self._since)
