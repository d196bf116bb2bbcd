"""All metrics of one server: for Prometheus under `quire_` names and `vllm:` aliases, and for dashboard and log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import WAIT_REASONS
from quire_server.metrics.gpu_use import GpuMetrics
from quire_server.metrics.history import MINUTE, History
from quire_server.metrics.metric_catalog import (
    REJECT_REASONS,
    REQUEST_SECONDS,
    STALL_SECONDS,
    AdapterMetrics,
    BatchMetrics,
    EngineMetrics,
    MinuteMetrics,
    ModelMetrics,
    PlanMetrics,
    RequestMetrics,
)
from quire_server.metrics.metric_values import Counter, Gauge, Histogram, HistogramByLabel, Values
from quire_server.metrics.occupancy import Occupancy, StaticBatching
from quire_server.metrics.replica_metrics import ReplicaMetrics, Row, Wanted
from quire_server.metrics.request_record import CURRENT, Load, RequestBoard, RequestRecord
from quire_server.metrics.usage import UsageBook

_LATELY = 10.0  # seconds of the busy share, and of the rates under vLLM's older names, as long as its own took


def load_progress(values: Values) -> Gauge:
    """The gauge of the load's progress."""
    return values.gauge(
        "quire_load_progress_ratio",
        "How far the phase is that the engine's latest start is in, 0 to 1; 1 when it is ready.",
    )


def while_loading(model_name: str, ratio: float) -> tuple[bytes, str]:
    """The exposition while the model is loaded, and its media type."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    load_progress(Values(registry, {"model_name": model_name})).set(ratio)
    return generate_latest(registry), CONTENT_TYPE_LATEST


class Metrics:
    """All metrics of one server, in a registry of their own. Used on the event loop's thread.

    Each request and token is counted once, whatever restarts.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int = 2048,
        tenants: Sequence[str] = (),
        usage: UsageBook | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        values = Values(self.registry, {"model_name": model_name})
        self._requests = RequestMetrics(values, max_model_len)
        self._engine = EngineMetrics(values)
        self._plan = PlanMetrics(values)
        self._minute, self.gpu = MinuteMetrics(values), GpuMetrics(values)
        self.tenants, self._adapters = TenantMetrics(values, tenants), AdapterMetrics(values)
        self.models, self.batches = ModelMetrics(values), BatchMetrics(values)
        self.observe_step, self.load_took = (
            self._engine.observe,
            self._plan.load_seconds.set,
        )  # once per step; per start
        self.engine_restarted = self._engine.restarted
        self.api_server_restarted = values.counter(
            "quire_api_server_restarts", "API servers that were started again, with --api-server-count 2 or more."
        ).inc
        self.replica_restarted = self._engine.restarts.inc  # of several, whose totals go on
        self.resize = self._engine.resize
        self.replicas = ReplicaMetrics(values)
        self.replica_rows: Callable[[], Iterable[Row]] = tuple  # called at each scrape, as the next one
        self.replicas_wanted: Callable[[], Wanted | None] = lambda: None
        self._rejected = values.counter(
            "quire_rejected",
            "Requests refused before they were queued, by reason.",
            ("reason",),
            children=[(reason,) for reason in REJECT_REASONS],
            alias="vllm:admission_rejections",
        )
        self._deadlines = values.counter(
            "quire_deadlines_exceeded", "HTTP requests that ended at their deadline, unfinished."
        )
        self.deadline_exceeded = self._deadlines.inc
        self._text_bytes = values.gauge(
            "quire_text_work_bytes",
            "Bytes of the texts that wait to be tokenized, detokenized or rendered, or are.",
        )
        self._texts = values.gauge("quire_text_work_waiting", "How many texts these are.")
        self._large_replies = values.gauge(
            "quire_large_reply_bytes", "Bytes of the replies above 256 KiB that are being made or sent."
        )
        self.large_replies = self._large_replies.set
        self._given_back = values.counter(
            "quire_memory_given_back_bytes",
            "Bytes that the server's process gave back to the system after large work.",
        )
        self.memory_given_back = self._given_back.inc
        stalls = values.histogram(
            "quire_event_loop_stall_seconds",
            "How late the server's event loop ran a timer, seconds.",
            STALL_SECONDS,
        )
        self.loop_stall = stalls.observe
        self._load_ratio = load_progress(values)
        self._connections = values.gauge("quire_http_connections", "Connections that are open.")
        self._body_bytes = values.gauge("quire_http_body_bytes", "Bytes of large request bodies that are held.")
        self.connections, self.body_bytes = self._connections.set, self._body_bytes.set
        self.load_took = self._plan.load_seconds.set  # seconds of an engine's start
        self.bytes_waiting: Callable[[], int] = lambda: 0  # of replies; read at each scrape
        self._waiting_bytes = values.gauge(
            "quire_reply_bytes_waiting",
            "Bytes of replies that clients have not taken, in the server's buffers and the system's.",
        )
        self.num_stalled: Callable[[], int] = lambda: 0  # read at each scrape
        self._stalled = values.gauge(
            "quire_http_connections_stalled", "Connections whose reply waits for the client to read."
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
        self._lost_lines = values.counter(
            "quire_log_records_dropped", "Log lines that were dropped, since the log was not read in time."
        )
        self._lost_gauge = Gauge([()])  # the same number, read with the gauges
        self.lost_log_lines: Callable[[], int] = lambda: 0  # called at each scrape
        self.usage = UsageBook(model_name) if usage is None else usage
        self.shared = Shared(
            counters=(
                *_all(self._requests, Counter),
                *_all(self.tenants, Counter),
                *(self._rejected, self._deadlines, self._given_back, self._http_requests),
            ),
            histograms=(*_all(self._requests, Histogram), stalls),
            by_label=(self._http_seconds,),
            gauges=(
                *(self._text_bytes, self._texts, self._large_replies, self._connections, self._body_bytes),
                *(self._waiting_bytes, self._stalled, self._lost_gauge),
            ),
        )
        self.guests: list[HasGauges] = []  # API servers beside this process
        self.load = Load(Occupancy(), StaticBatching(self._requests.static_slots), RequestBoard(), self.usage)
        self.occupied = self.load.occupancy.occupied  # called whenever the number of sequences changes
        self.history = History(
            engine=self._engine,
            requests=self._requests,
            rejected=self._rejected,
            stalls=stalls,
            occupancy=self.load.occupancy,
            static=self.load.static,
            board=self.load.board,
            gpu=self.gpu.read,
        )

    # -- one request

    def start(
        self,
        prompt_tokens: int,
        max_tokens: int | None,
        n: int,
        request_id: str = "",
        *,
        started: float | None = None,
    ) -> RequestRecord:
        """A prompt with n choices was accepted, now or at `started`; returns its record."""
        story = CURRENT.get()
        record = RequestRecord(
            self._requests,
            self.load,
            request_id=request_id,
            account="" if story is None else story.account,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            n=n,
            started=started,
        )
        if story is not None:
            story.records.append(record)
        return record

    def reject(self, reason: str) -> None:
        """A request was refused before it was queued. `reason` comes from a fixed set, never from a client."""
        self._rejected.inc(1, reason)

    def http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A reply ended. `handler`: a route's template; `method`: a known one, so that clients cannot make labels."""
        self._http_requests.inc(1, handler, method, str(status))
        self._http_seconds.observe(seconds, handler)

    # -- the engine

    def observe_plan(self, plan: EnginePlan, mean_kl: float | None = None) -> None:
        """The engine started with this plan. `mean_kl`: the measured loss of its quantisation; None: not measured."""
        self._plan.observe(plan, mean_kl)
        self._engine.begin(plan)
        self._adapters.begin(plan)
        self.gpu.follow(plan.machine.gpu)
        limits = plan.scheduler.limits
        self.load.static.max_size = limits.max_num_seqs
        self.history.block_size, self.history.max_model_len = limits.block_size, plan.scheduler.max_model_len

    # -- the server

    def text_work(self, num_bytes: int, num_texts: int) -> None:
        """Set the bytes and the number of texts that wait or are processed."""
        self._text_bytes.set(num_bytes)
        self._texts.set(num_texts)

    def tick(self) -> bytes:
        """A second has passed: update the gauges over the last minute; returns the new values as JSON."""
        history = self.history
        news = history.tick(time.monotonic(), time.time())
        self._minute.show(
            history.window(MINUTE),
            history.window(_LATELY),
            peak=history.peak,
            static_longest=history.static_longest,
            static_full=history.static_full,
        )
        return news

    def throughput(self) -> Throughput:
        """The totals and gauges of the periodic log line."""
        self._engine.show(time.monotonic())
        return Throughput(self._requests, self._engine)

    def render(self, load_ratio: float = 1.0) -> bytes:
        """The exposition in the text format; `load_ratio`: the progress of the engine's start."""
        return generate_latest(_Collected(self.families(load_ratio)))

    def families(self, load_ratio: float) -> list[Metric]:
        """The values of all metrics as they are now."""
        self._load_ratio.set(load_ratio)
        self._engine.show(time.monotonic())
        self._adapters.show(self._engine.state)
        self.models.show()
        self.gpu.show()
        self.replicas.show(self.replica_rows(), self.replicas_wanted())
        self.read_gauges()
        own = [each.get() for each in self.shared.gauges]
        for guest in self.guests:
            for gauge, value in zip(self.shared.gauges, guest.gauges, strict=False):  # none before its first
                gauge.set(gauge.get() + value)
        self._lost_lines.values[()] = self._lost_gauge.get()
        try:
            return list(self.registry.collect())
        finally:
            for gauge, value in zip(self.shared.gauges, own, strict=True):
                gauge.set(value)

    def read_gauges(self) -> None:
        """Set the gauges that are read when they are asked for."""
        self._lost_gauge.set(float(self.lost_log_lines()))
        self._waiting_bytes.set(self.bytes_waiting())
        self._stalled.set(self.num_stalled())

    def aborted(self, num_requests: int) -> None:
        """Count requests that have ended with the process that had their clients."""
        self._requests.finished.inc(num_requests, "abort")


class _Collected(Collector):
    """Values that were collected before."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render_several(each: Iterable[tuple[Metrics, float]]) -> bytes:
    """The exposition of several models together, each with the progress of its engine's start.

    A metric is one family with the samples of all models by `model_name`; metrics of the process come once.
    """
    families: dict[str, Metric] = {}
    for metrics, load_ratio in each:
        for family in metrics.families(load_ratio):
            known = families.setdefault(family.name, family)
            if known is not family and any("model_name" in sample.labels for sample in family.samples):
                known.samples.extend(family.samples)
    return generate_latest(_Collected(families.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The metrics that every API server has a part of: counts are added up, and so are these gauges."""

    counters: tuple[Counter, ...]
    histograms: tuple[Histogram, ...]
    by_label: tuple[HistogramByLabel, ...]
    gauges: tuple[Gauge, ...]


class HasGauges(Protocol):
    """The part of another process: its gauges in the order of `Shared.gauges`, or none."""

    @property
    def gauges(self) -> list[float]: ...


Kind = TypeVar("Kind", Counter, Histogram)


def _all(owner: object, kind: type[Kind]) -> list[Kind]:
    return [each for each in vars(owner).values() if isinstance(each, kind)]


class Throughput:
    """A snapshot for the log: totals since the start, and the current state."""

    __slots__ = ("computed", "generated", "hits", "queries", "running", "usage", "waiting")

    def __init__(self, requests: RequestMetrics, engine: EngineMetrics) -> None:
        self.computed = engine.steps.computed.get("prefill")
        self.generated = requests.generated.get()
        self.queries = engine.query_tokens.get()
        self.hits = engine.hit_tokens.get()
        self.running = int(engine.running.get())
        self.waiting = sum(int(engine.waiting.get(reason)) for reason in WAIT_REASONS)
        self.usage = engine.usage.get()


TENANT_REFUSALS = ("tenant_requests", "tenant_tokens", "tenant_queue", "tenant_day_budget", "tenant_month_budget")


class TenantMetrics:
    """Requests, refusals and tokens of the operator's tenants. Without a list of tenants nothing is exported."""

    def __init__(self, values: Values, tenants: Iterable[str]) -> None:
        self._accepted = values.counter(
            "quire_tenant_requests",
            "Prompts accepted, by tenant.",
            ("tenant",),
            children=(),
        )
        self._refused = values.counter(
            "quire_tenant_rejected",
            "Requests refused for a tenant's rate or quota, by tenant and reason.",
            ("tenant", "reason"),
            children=(),
        )
        self._tokens = values.counter(
            "quire_tenant_tokens",
            "Tokens that fair shares are made of, by tenant and kind: prompt, uncached and computed once, or output.",
            ("tenant", "kind"),
            children=(),
        )
        self._queue_seconds = values.counter(
            "quire_tenant_queue_seconds",
            "Time from arrival to the first step, summed over prompts, by tenant.",
            ("tenant",),
            children=(),
        )
        self._names: frozenset[str] = frozenset()
        self.change(tenants)

    def change(self, tenants: Iterable[str]) -> None:
        """Replace the tenants; each is exported at once."""
        self._names = frozenset(tenants)
        for name in self._names:
            for counter in (self._accepted, self._queue_seconds):
                counter.inc(0, name)
            for reason in TENANT_REFUSALS:
                self._refused.inc(0, name, reason)
            self.computed(name, prompt=0, output=0)

    def accepted(self, tenant: str) -> None:
        self._accepted.inc(1, tenant)

    def refused(self, tenant: str, reason: str) -> None:
        self._refused.inc(1, tenant, reason)

    def computed(self, tenant: str, *, prompt: int, output: int) -> None:
        self._tokens.inc(prompt, tenant, "prompt")
        self._tokens.inc(output, tenant, "output")

    def queued(self, tenant: str, seconds: float) -> None:
        """A prompt of the tenant waited so long."""
        if tenant in self._names:
            self._queue_seconds.inc(seconds, tenant)
