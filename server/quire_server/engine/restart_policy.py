"""The policy of restarts: how long a silence is a hang, how many failures are allowed, how long to back off.

Owns the count of failures and the longest step. Promises: an engine that keeps failing within the window is given up; a
failure that a request has caused does not count; the caller passes the time. Must not know: processes, requests,
clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import EngineStats

# FLOP/s of the slowest machine that one would serve on: a full step of a big model may take minutes on a CPU.
_SLOWEST_FLOPS = {"cpu": 2e10}
_SLOWEST_GPU_FLOPS = 1e12
_GPU_SECONDS = 60.0  # a step may compile a kernel
_LONGEST_BACKOFF_SECONDS = 10.0
_STEPS = 5.0  # a silence of this many times the longest step is a hang
_FULL = 0.5  # a step with this share of the most tokens counts as a full one


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The limits at which an engine that keeps failing is given up, and a silent one is called hung."""

    max_restarts: int = 5
    window_seconds: float = 600.0
    hang_seconds: float = 10.0  # silence that means a hang, unless a step may take longer
    absent_seconds: float | None = None  # without a sign of life that mean a loss; None: processes send none
    start_seconds: float = 60.0  # without progress of a start that mean a hang
    spare_seconds: float | None = None  # from ready to the launch of the spare process; None: no spare
    first_backoff_seconds: float = 0.1  # doubled with each failed start in a row

    def hang_limit(self, plan: EnginePlan) -> float:
        """Seconds of silence that mean a hang: `hang_seconds`, or the model's largest step if that may take longer."""
        limits, context = plan.scheduler.limits, plan.scheduler.max_model_len
        cost, device = plan.cost, plan.machine.device
        attention = 4.0 * (cost.layer_attention + cost.sampled_attention) * context
        full_step = limits.max_num_batched_tokens * (2.0 * plan.model.num_parameters + attention)
        seconds = full_step / _SLOWEST_FLOPS.get(device, _SLOWEST_GPU_FLOPS)
        return max(self.hang_seconds, seconds, 0.0 if device == "cpu" else _GPU_SECONDS)


class HangLimit:
    """Seconds of silence that mean a hang; longer after longer steps.

    Until a step of about the largest size was seen, the estimate from the plan counts, because the steps of short
    prompts say little.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.longest_step = 0.0  # seconds
        self._policy = policy
        self._least = self._estimate = policy.hang_seconds
        self._full_tokens = 0.0
        self._has_seen_full = False

    def expect(self, plan: EnginePlan) -> None:
        """Compute the estimate for an engine's plan."""
        self._estimate = self._policy.hang_limit(plan)
        self._full_tokens = _FULL * plan.scheduler.limits.max_num_batched_tokens
        self._least = self._policy.hang_seconds if plan.machine.device == "cpu" else self._estimate

    def learn(self, stats: EngineStats) -> None:
        """Take in a step that was longer than all before."""
        self.longest_step = stats.step_seconds
        if stats.prefill_tokens + stats.decode_tokens >= self._full_tokens:
            self._has_seen_full = True

    @property
    def seconds(self) -> float:
        least = self._least if self._has_seen_full else self._estimate
        return max(least, _STEPS * self.longest_step)


class RestartBudget:
    """Counts failures and decides on each: restart, back off first, or give up."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._failures: deque[float] = deque()  # times, seconds
        self._backoff = 0.0  # seconds

    def engine_failed(self, now: float) -> None:
        """A running engine has failed: the next one may start at once."""
        self._failures.append(now)
        self._backoff = 0.0

    def start_failed(self, now: float) -> None:
        """A start failed: back off before the next one, twice as long each time."""
        self._failures.append(now)
        self._backoff = min(max(2 * self._backoff, self._policy.first_backoff_seconds), _LONGEST_BACKOFF_SECONDS)

    def started(self) -> None:
        """A new engine is ready."""
        self._backoff = 0.0

    def forgive(self, times: Collection[float]) -> None:
        """Uncount the failures at these times: a request has caused them, and clients must not use up the budget."""
        self._failures = deque(time for time in self._failures if time not in times)

    def pause(self, now: float) -> float | None:
        """Seconds to back off before the next start. None: give up."""
        while self._failures and self._failures[0] < now - self._policy.window_seconds:
            self._failures.popleft()
        return self._backoff if len(self._failures) <= self._policy.max_restarts else None

    def __str__(self) -> str:
        return f"the engine failed {len(self._failures)} times in {self._policy.window_seconds:.0f} s"
