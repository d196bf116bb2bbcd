"""What the server puts up with from its engine: how long a silence, how many failures, how fast a new start.

Owns the count of failures. Promises: what keeps failing within the window is given up; the caller says what time it is.
Must not know: processes, requests, clocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quire_engine.config import EnginePlan

_SLOWEST_FLOPS = 2e10  # of a machine on which one would still serve: a full step of a big model may take minutes
_LONGEST_BACKOFF_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When to give up on an engine that keeps dying, and when to call it hung."""

    max_restarts: int = 5
    window_seconds: float = 600.0
    hang_seconds: float = 60.0  # silence that means a hang, unless the largest step may take longer
    first_backoff_seconds: float = 0.1  # doubled with each failed start in a row

    def hang_limit(self, plan: EnginePlan) -> float:
        """Seconds of silence that mean a hang: `hang_seconds`, or what the model's largest step may take if more."""
        full_step = 2.0 * plan.num_parameters * plan.scheduler.limits.max_num_batched_tokens / _SLOWEST_FLOPS
        return max(self.hang_seconds, full_step)


class RestartBudget:
    """Counts failures and decides on each: restart, back off first, or give up."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._failures: deque[float] = deque()  # times, seconds
        self._backoff = 0.0  # seconds

    def engine_failed(self, now: float) -> None:
        """A running engine has ended by its own fault: the next one may start at once."""
        self._failures.append(now)
        self._backoff = 0.0

    def start_failed(self, now: float) -> None:
        """A new engine did not get ready: the next one has to wait, longer each time."""
        self._failures.append(now)
        self._backoff = min(max(2 * self._backoff, self._policy.first_backoff_seconds), _LONGEST_BACKOFF_SECONDS)

    def started(self) -> None:
        """A new engine is ready."""
        self._backoff = 0.0

    def pause(self, now: float) -> float | None:
        """Seconds to wait before the next start. None: give up."""
        while self._failures and self._failures[0] < now - self._policy.window_seconds:
            self._failures.popleft()
        return self._backoff if len(self._failures) <= self._policy.max_restarts else None

    def __str__(self) -> str:
        return f"the engine failed {len(self._failures)} times in {self._policy.window_seconds:.0f} s"
