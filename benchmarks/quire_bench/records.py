"""Records of one request, and of all of a run, as timestamps and counts.

Promises: written once, by whoever sent the request; times are `time.perf_counter()` seconds. Must not know: HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OK = "ok"


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. `outcome` is "ok" or what went wrong: http_429, unreachable, broken, error_event, timeout."""

    due: float  # when it was to be sent; latencies count from here, however late the sender was
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of the chunks that carried output
    ended: float = 0.0
    outcome: str = "broken"
    detail: str = ""
    input_tokens: int = 0
    asked_tokens: int = 0
    output_tokens: int = 0

    @property
    def is_ok(self) -> bool:
        return self.outcome == OK


@dataclass(slots=True, kw_only=True)
class Run:
    """One load point of one server in one round. `in_flight`: (time, requests in flight from then on)."""

    started: float
    ended: float = 0.0
    records: list[Record] = field(default_factory=list)
    in_flight: list[tuple[float, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ended - self.started
