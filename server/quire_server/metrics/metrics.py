"""What the server tells Prometheus, under `quire_` names and `vllm:` aliases; `RequestRecord` follows one request.

Promises: each request and token is counted once, whatever restarts; both names show the same values.
Must not know: routes, how a request is served, torch.
"""

from __future__ import annotations

import time

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from quire_engine.config import EnginePlan
from quire_engine.types import RequestTiming
from quire_server.metrics.metric_catalog import (
    REJECT_REASONS,
    REQUEST_SECONDS,
    STALL_SECONDS,
    WAIT_REASONS,
    EngineMetrics,
    Outcome,
    PlanMetrics,
    RequestMetrics,
)
from quire_server.metrics.metric_values import Values


class Metrics:
    """All metrics of one server, in a registry of their own. Used on the event loop's thread."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str, *, vllm_aliases: bool = True, max_model_len: int = 2048) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        labels = {"model_name": model_name}
        values = Values(self.registry, labels, labels | {"engine": "0"} if vllm_aliases else None)
        self._requests = RequestMetrics(values, max_model_len)
        self._engine = EngineMetrics(values)
        self._plan = PlanMetrics(values)
        self.observe_step = self._engine.observe  # once per step
        self._rejected = values.counter(
            "quire_rejected",
            "Requests refused before they were queued, by reason.",
            ("reason",),
            children=[(reason,) for reason in REJECT_REASONS],
            alias="vllm:admission_rejections",
        )
        self._stalls = values.histogram(
            "quire_event_loop_stall_seconds",
            "How late the server's event loop ran a timer, seconds.",
            STALL_SECONDS,
        )
        self._http_requests = values.counter(
            "quire_http_requests",
            "HTTP replies, by route template, method and status.",
            ("handler", "method", "status"),
        )
        self._http_seconds = values.histograms(
            "quire_http_request_duration_seconds",
            "From the request's head to the end of the reply, seconds, by route template.",
            REQUEST_SECONDS,
            "handler",
        )

    # -- one request

    def start(self, prompt_tokens: int, max_tokens: int | None, n: int) -> RequestRecord:
        """A prompt with n choices was accepted, now."""
        return RequestRecord(self._requests, prompt_tokens=prompt_tokens, max_tokens=max_tokens, n=n)

    def reject(self, reason: str) -> None:
        """A request was refused before it was queued. `reason` comes from a fixed set, never from a client."""
        self._rejected.inc(1, reason)

    def http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A reply ended. `handler` is a route's template and `method` a known one: clients must not make labels."""
        self._http_requests.inc(1, handler, method, str(status))
        self._http_seconds.observe(seconds, handler)

    # -- the engine

    def observe_plan(self, plan: EnginePlan) -> None:
        """The engine started with this plan."""
        self._plan.observe(plan)
        self._engine.begin(plan)

    def engine_restarted(self) -> None:
        """The engine process was replaced: its totals begin at 0 again, and nothing runs for now."""
        self._engine.restarted()

    # -- the server

    def loop_stall(self, seconds: float) -> None:
        """The event loop ran a timer this much too late."""
        self._stalls.observe(seconds)

    def throughput(self) -> Throughput:
        """The totals and gauges of the periodic log line."""
        self._engine.show()
        return Throughput(self._requests, self._engine)

    def render(self) -> bytes:
        """The exposition, in the text format."""
        self._engine.show()
        return generate_latest(self.registry)


class Throughput:
    """A snapshot for the log: totals since the start, and the state now."""

    __slots__ = ("computed", "generated", "hits", "queries", "running", "usage", "waiting")

    def __init__(self, requests: RequestMetrics, engine: EngineMetrics) -> None:
        self.computed = engine.computed.get("prefill")
        self.generated = requests.generated.get()
        self.queries = engine.query_tokens.get()
        self.hits = engine.hit_tokens.get()
        self.running = int(engine.running.get())
        self.waiting = sum(int(engine.waiting.get(reason)) for reason in WAIT_REASONS)
        self.usage = engine.usage.get()


class RequestRecord:
    """The times and counts of one prompt and its choices. Times are `time.monotonic()` seconds.

    What the client sees is measured here, in the server; queue, KV wait and prefill come from the engine.
    """

    __slots__ = (
        "_cached",
        "_counts",
        "_finished",
        "_first",
        "_last",
        "_max_tokens",
        "_metrics",
        "_n",
        "_prompt_counted",
        "_prompt_tokens",
        "_started",
        "_timing",
        "_token_seconds",
    )

    def __init__(self, metrics: RequestMetrics, *, prompt_tokens: int, max_tokens: int | None, n: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._n = n
        self._started = time.monotonic()
        self._first: float | None = None
        self._last: list[float] = [0.0] * n
        self._counts = [0] * n
        self._token_seconds = 0.0  # summed over choices: from each one's first token to its last
        self._cached = 0
        self._timing: RequestTiming | None = None
        self._prompt_counted = False
        self._finished = False

    def tokens(self, choice: int, count: int, now: float) -> None:
        """`count` new tokens of a choice arrived together."""
        if count <= 0:
            return
        metrics = self._metrics
        metrics.generated.inc(count)
        if self._first is None:
            self._first = now
            metrics.ttft.observe(now - self._started)
            self._count_prompt()
        following = count
        if self._counts[choice] == 0:
            self._last[choice] = now
            following -= 1
        if following:
            gap = now - self._last[choice]
            metrics.itl.observe(gap / following, following)
            self._token_seconds += gap
            self._last[choice] = now
        self._counts[choice] += count

    def cached(self, tokens: int) -> None:
        """So many prompt tokens came from the prefix cache."""
        self._cached = max(self._cached, tokens)

    def timing(self, timing: RequestTiming) -> None:
        """What the engine measured so far; of several choices the longest time of each kind counts."""
        known = self._timing
        self._timing = timing if known is None else _longest(known, timing)

    def finish(self, outcome: Outcome) -> None:
        """The request ended. Idempotent. Latencies are those of requests that ran to their end."""
        if self._finished:
            return
        self._finished = True
        metrics = self._metrics
        metrics.finished.inc(1, outcome)
        if outcome not in {"stop", "length"}:
            return
        self._count_prompt()
        generated = sum(self._counts)
        following = sum(count - 1 for count in self._counts if count)
        decode_seconds = max(0.0, max(self._last) - self._first) if self._first is not None else 0.0
        metrics.e2e.observe(time.monotonic() - self._started)
        metrics.prompt_tokens.observe(self._prompt_tokens)
        metrics.generation_tokens.observe(generated)
        metrics.max_generation_tokens.observe(max(self._counts))
        metrics.computed_tokens.observe(max(0, self._prompt_tokens - self._cached))
        metrics.params_n.observe(self._n)
        if self._max_tokens is not None:
            metrics.params_max_tokens.observe(self._max_tokens)
        metrics.decode.observe(decode_seconds)
        if following:
            metrics.tpot.observe(self._token_seconds / following)
        if self._timing is not None:
            metrics.queue.observe(self._timing.queue_seconds)
            metrics.kv_wait.observe(self._timing.kv_wait_seconds)
            metrics.prefill.observe(self._timing.prefill_seconds)
            metrics.inference.observe(self._timing.prefill_seconds + decode_seconds)
            metrics.preemptions.observe(self._timing.num_preemptions)

    def _count_prompt(self) -> None:
        if not self._prompt_counted:
            self._prompt_counted = True
            self._metrics.prompted.inc(self._prompt_tokens)
            self._metrics.cached.inc(min(self._cached, self._prompt_tokens))


def _longest(one: RequestTiming, other: RequestTiming) -> RequestTiming:
    return RequestTiming(
        queue_seconds=max(one.queue_seconds, other.queue_seconds),
        kv_wait_seconds=max(one.kv_wait_seconds, other.kv_wait_seconds),
        prefill_seconds=max(one.prefill_seconds, other.prefill_seconds),
        num_preemptions=max(one.num_preemptions, other.num_preemptions),
    )
