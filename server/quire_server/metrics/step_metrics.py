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
_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_KEPT = 0.98  # factor on older measurements per step: about the last fifty count
_MOSTLY = 4  # fewest prompt tokens per decode in a step that is measured


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
            field="total_busy_seconds",
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
        self._rows = values.histogram(
            "quire_engine_step_rows",
            "Rows that a step computed: prompt tokens, decodes and guessed tokens behind them, without padding.",
            _TOKENS,
        )
        self._predicted = values.histogram(
            "quire_engine_step_predicted_seconds",
            "What the steps before it let expect of a step, as admission reckons, seconds: of every step with prompts,"
            " and of each sixteenth without.",
            _SECONDS,
        )
        self._errors = values.histograms(
            "quire_engine_step_prediction_ratio",
            "Of the same steps, by kind, with prompts (prompt) or without (decode): seconds that it took over those"
            " predicted, from its plan or the end of the step before it to its results. 1 is exact.",
            _RATIOS,
            "kind",
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
        self._rows.observe(stats.step_rows)
        if stats.predicted_seconds:
            self._predicted.observe(stats.predicted_seconds)
            kind = "prompt" if stats.prefill_tokens else "decode"
            self._errors.observe(stats.seen_seconds / stats.predicted_seconds, kind)
        self.computed.inc(stats.prefill_tokens, "prefill")
        self.computed.inc(stats.decode_tokens, "decode")

    def take_last(self) -> list[EngineStats]:
        """The steps since the last call, at most the last `MOST_STEPS`."""
        steps = list(self._last)
        self._last.clear()
        return steps


class PrefillCost:
    """The slope of a line through the last steps that computed prompts: seconds over tokens."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Take in a step's sizes and the model's seconds; steps with mostly decodes are ignored."""
        if prompt_tokens == 0 or prompt_tokens < _MOSTLY * num_decodes:
            return
        tokens = prompt_tokens + num_decodes
        self._n = self._n * _KEPT + 1
        self._x = self._x * _KEPT + tokens
        self._y = self._y * _KEPT + seconds
        self._xx = self._xx * _KEPT + tokens * tokens
        self._xy = self._xy * _KEPT + tokens * seconds

    @property
    def seconds_per_token(self) -> float:
        """0 before the first prompt. If all steps have one size, their mean: an upper bound of the slope."""
        if self._n == 0:
            return 0.0
        mean = self._y / self._x
        spread = self._xx - self._x * self._x / self._n
        if spread < 0.01 * self._xx:
            return mean
        slope = (self._xy - self._x * self._y / self._n) / spread
        return slope if 0 < slope < mean else mean
