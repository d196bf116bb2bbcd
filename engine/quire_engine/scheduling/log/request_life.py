"""One request's life in the step log: the time in each phase, and its chunks, preemptions and stalls.

Phases follow each other without a gap, so their seconds add up to the request's whole time; the parts before the first
token add up to the time to first token (TTFT).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire_engine.contract.types import FinishReason, HoldReason
from quire_engine.scheduling.sequence import Group, Sequence

# transit: from the arrival to the scheduler; queue: until it enters; prefill: until its first token; decode: until its
# end; preempted: until it enters again; recompute: until its next token; held: until its release; done: after its end.
Phase = Literal["transit", "queue", "prefill", "decode", "preempted", "recompute", "held", "done"]
PreemptionMode = Literal["recompute", "swap"]
MOST_NOTES = 512  # chunks, preemptions, stalls and waits kept per request; further ones are only counted


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of the prompt, or of tokens that are computed again after a preemption."""

    step: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """The loss of a request's blocks: the step, its cause, how they come back, and the request that they were for."""

    step: int
    cause: str
    mode: PreemptionMode
    by: str = ""  # empty where it needed them itself, or the device had no memory


@dataclass(frozen=True, slots=True)
class Stall:
    """Consecutive steps without a token for a request that had its first token already."""

    first_step: int
    last_step: int
    seconds: float


@dataclass(slots=True)
class Spent:
    """Time in one phase for one reason."""

    seconds: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The earlier content of its cache scope with which a prompt has the longest common prefix."""

    ordinal: int
    num_tokens: int  # of that prefix
    token: int | None  # the prompt's behind it; None: it ends there
    other_token: int | None  # the other's


@dataclass(slots=True, eq=False, kw_only=True)
class RequestLife:
    """The record of one request so far."""

    request_id: str
    arrived_at: float
    added_step: int  # the last step that was planned without it
    num_prompt_tokens: int
    max_new_tokens: int
    num_choices: int
    num_resumed_tokens: int  # output tokens from an earlier engine process
    wait_bound: int
    group: Group | None  # None after its end
    prompt_ordinal: int = 0  # the prompt's number in `Contents`
    nearest: Nearest | None = None  # None: contents are not compared
    reads_cache: bool = True  # a cached prefix may be used
    phase: Phase = "transit"
    reason: str = ""  # why it waits
    spent: dict[tuple[Phase, str], Spent] = field(default_factory=dict)
    before_first_token: dict[tuple[Phase, str], Spent] | None = None  # `spent` at the first token
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
    num_guessed: int = 0  # tokens, computed behind its decodes
    num_guessed_right: int = 0
    kv_wait_seconds: float = 0.0
    kv_wait_steps: list[int] = field(default_factory=list)  # steps with which a wait for blocks began
    sequences: dict[int, Sequence] = field(default_factory=dict)  # unfinished choices
    sequence_ids: list[int] = field(default_factory=list)  # of all choices
    _since: float = 0.0
    _since_step: int = 0
    _stalled_at: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self._since, self._since_step = self.arrived_at, self.added_step

    @property
    def is_computing_prompt(self) -> bool:
        """Whether its slices do not bring a token yet."""
        return self.phase in {"prefill", "recompute"}

    @property
    def has_ended(self) -> bool:
        return self.phase == "done"

    def spent_until(self, step: int, now: float) -> dict[tuple[Phase, str], Spent]:
        """The time in each phase, with the current phase up to `now`."""
        account = {key: Spent(each.seconds, each.steps) for key, each in self.spent.items()}
        if not self.has_ended:
            current = account.setdefault((self.phase, self.reason), Spent())
            current.seconds += max(0.0, now - self._since)
            current.steps += step - self._since_step
        return account

    def note_transit(self, reason: str, seconds: float, now: float) -> None:
        """Note that so many seconds of the request's way to the scheduler were for this reason."""
        self.spent["transit", reason] = Spent(min(seconds, max(0.0, now - self.arrived_at)))
        self._since += self.spent["transit", reason].seconds

    def wait(self, reason: str, step: int, now: float) -> None:
        """Note that the request does not run in this step, for this reason."""
        if reason == "kv" and self.reason != "kv" and len(self.kv_wait_steps) < MOST_NOTES:
            self.kv_wait_steps.append(step)
        self._change_phase("preempted" if self.phase in {"preempted", "recompute"} else "queue", reason, step - 1, now)

    def enter(self, num_cached_tokens: int, step: int, now: float) -> None:
        """Note that the request runs from this step on, with `num_cached_tokens` tokens of its prompt cached."""
        if self.first_step is None:
            self.first_step, self.num_cached_tokens = step, num_cached_tokens
        self._change_phase("prefill" if self.first_token_step is None else "recompute", "", step - 1, now)

    def note_chunk(self, step: int, start: int, num_tokens: int) -> None:
        """A slice that is not a decode."""
        self.num_chunks += 1
        if len(self.chunks) < MOST_NOTES:
            self.chunks.append(Chunk(step, start, num_tokens))

    def note_token(self, step: int, now: float) -> None:
        """Note that the request got its first token, or the first one after a preemption."""
        self._change_phase("decode", "", step, now)
        if self.first_token_step is None:
            self.first_token_step = step
            self.before_first_token = {key: Spent(each.seconds, each.steps) for key, each in self.spent.items()}
        if self._stalled_at is not None:
            first, since = self._stalled_at
            self._stalled_at = None
            self.num_stalls += 1
            if len(self.stalls) < MOST_NOTES:
                self.stalls.append(Stall(first, step - 1, now - since))

    def preempt(self, cause: str, step: int, now: float, *, mode: PreemptionMode, by: str = "") -> None:
        """Note that the request loses its blocks and waits again."""
        if self.first_token_step is not None and self._stalled_at is None:
            self._stalled_at = step, now
        self.num_preemptions += 1
        if len(self.preemptions) < MOST_NOTES:
            self.preemptions.append(Preemption(step, cause, mode, by))
        self._change_phase("preempted", "", step - 1, now)

    def hold(self, reason: HoldReason, step: int, now: float) -> None:
        """Note that the request is held after this step, for this reason."""
        self._change_phase("held", reason, step, now)

    def release(self, step: int, now: float, *, wait_bound: int) -> None:
        """Note that the request waits again after this step."""
        self.wait_bound = step - self.added_step + wait_bound
        self._change_phase("queue" if self.first_step is None else "preempted", "", step, now)

    def end(self, choice: int, finish: FinishReason, num_tokens: int) -> None:
        """A choice ends, with `num_tokens` output tokens."""
        self.finishes[choice] = finish
        del self.sequences[choice]
        self.num_output_tokens += num_tokens

    def finish(self, step: int, now: float) -> None:
        """The last choice has ended: drop the references to the group and its sequences."""
        if self.group is not None:
            self.kv_wait_seconds = self.group.kv_wait_seconds
        self.last_step, self.group = step, None
        self.sequences.clear()
        self._change_phase("done", "", step, now)

    def _change_phase(self, phase: Phase, reason: str, step: int, now: float) -> None:
        """Add the time of the phase that ended with `step`, and begin the next one."""
        spent = self.spent.setdefault((self.phase, self.reason), Spent())
        spent.seconds += max(0.0, now - self._since)
        spent.steps += step - self._since_step
        self.phase, self.reason, self._since_step = phase, reason, step
        self._since = max(now, self._since)
