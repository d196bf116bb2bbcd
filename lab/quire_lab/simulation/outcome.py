"""The outcome of a simulated load: the times of each request, and the counts of the run.

Promises: nothing is rounded or left out; times are seconds of the simulated clock. Must not know: the scheduler.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from quire_bench.traces import TraceRow
from quire_engine.contract.types import PreemptionCause


@dataclass(slots=True, kw_only=True)
class Served:
    """One request's life. Times are 0 until they are known."""

    row: TraceRow
    number: int  # its index in the load
    at: float  # sent
    refused: str = ""  # the limit that refused it, or "infeasible"
    why: str = ""
    queue_seconds: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0  # the end, when it has ended
    num_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    ended_step: int = 0  # steps until its last token, counted from 1

    @property
    def num_left(self) -> int:
        """Tokens to come."""
        return self.row.output_tokens - self.num_tokens

    @property
    def ttft(self) -> float:
        return self.first_at - self.at

    @property
    def e2e(self) -> float:
        return self.last_at - self.at

    @property
    def tpot(self) -> float | None:
        """Mean time between its tokens; None with fewer than two."""
        return (self.last_at - self.first_at) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state in one step."""

    at: float
    blocks_used: int
    running: int
    waiting: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A whole run."""

    num_blocks: int
    requests: list[Served] = field(default_factory=list)
    gaps: array[float] = field(
        default_factory=lambda: array("d")
    )  # seconds between two tokens of a request, over all requests
    moments: list[Moment] = field(default_factory=list)  # thinned out in long runs
    live: list[tuple[float, int]] = field(default_factory=list)  # (time, accepted and unfinished requests from then on)
    seconds: float = 0.0  # until the last request had ended
    steps: int = 0
    busy_seconds: float = 0.0
    computed_tokens: int = 0
    decode_tokens: int = 0
    peak_blocks: int = 0
    peak_step: int = 0  # the first step with the peak, counted from 0
    block_steps: int = 0  # used blocks, summed over steps
    cumulative_blocks: int = 0  # sum of each request's blocks at its end
    total_preemptions: int = 0
    preemptions_by_cause: dict[PreemptionCause, int] = field(default_factory=dict)
    recomputed_tokens: int = 0  # of the computed ones: again, since a preemption had lost their blocks
    evictions: int = 0
    guessed_tokens: int = 0  # of the computed ones: behind decodes
    guessed_right: int = 0

    def note_live(self, at: float, count: int) -> None:
        """Note that `count` requests are accepted and unfinished from now on."""
        self.live.append((at, count))

    @property
    def done(self) -> list[Served]:
        """Requests that were served."""
        return [one for one in self.requests if not one.refused]
