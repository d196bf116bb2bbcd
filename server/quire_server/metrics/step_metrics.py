"""The metrics of steps: how many there were, how long they took, and what they computed.

Promises: a step is counted once, and the history gets each of the last ones.
"""

from __future__ import annotations

from collections import deque

from quire_engine.contract.types import EngineStats
from quire_server.metrics.metric_values import Values

MOST_STEPS = 4096  # most steps kept for the history: more than an engine computes in a second
_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_HOST_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepMetrics:
    """The engine's steps, of several engines each one's."""

    def __init__(self, values: Values) -> None:
        self._last: deque[EngineStats] = deque(maxlen=MOST_STEPS)
        self.count = values.counter("quire_engine_steps", "Steps that computed something.")
        self._seconds = values.histogram("quire_engine_step_seconds", "Duration of a step, seconds.", _SECONDS)
        self._host_seconds = values.histogram(
            "quire_engine_step_host_seconds",
            "Duration of a step without the model: scheduling and bookkeeping, seconds.",
            _HOST_SECONDS,
        )
        self.busy_seconds = values.counter(
            "quire_engine_busy_seconds",
            "Time that the engine has spent in steps, by its own clock, as of the last one, seconds; of several engines"
            " the sum.",
        )
        self._tokens = values.histogram(
            "quire_engine_step_tokens", "Prompt tokens computed and tokens generated in one step.", _TOKENS
        )
        self._request_tokens = values.histogram(
            "quire_engine_step_request_tokens",
            "Tokens generated in one step and, of requests that got their first one, the prompt, cached or not.",
            _TOKENS,
            alias="vllm:iteration_tokens_total",
        )
        self.computed = values.counter(
            "quire_engine_computed_tokens",
            "Tokens run through the model, by kind; recomputation included.",
            ("kind",),
            children=[("prefill",), ("decode",)],
        )

    def observe(self, stats: EngineStats, generated: int, begun: int) -> None:
        """Count a step. `generated`: tokens that it sent; `begun`: of the prompts whose first token it sent."""
        self._last.append(stats)
        self.count.inc()
        self._seconds.observe(stats.step_seconds)
        self._host_seconds.observe(stats.host_seconds)
        self._tokens.observe(stats.prefill_tokens + generated)
        self._request_tokens.observe(begun + generated)
        self.computed.inc(stats.prefill_tokens, "prefill")
        self.computed.inc(stats.decode_tokens, "decode")

    def take_last(self) -> list[EngineStats]:
        """The steps since the last call, at most the last `MOST_STEPS`."""
        steps = list(self._last)
        self._last.clear()
        return steps
