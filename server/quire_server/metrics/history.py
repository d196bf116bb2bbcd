"""A history of ten minutes, second by second, for the dashboard and for gauges over a window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec

from quire_engine.contract.types import NO_DRAFT_CAUSES, EngineStats, NoDraftCause
from quire_server.metrics.alert_rules import Alert, AlertRules
from quire_server.metrics.gpu_use import GpuUse
from quire_server.metrics.metric_catalog import TOKEN_SECONDS, TTFT_SECONDS, EngineMetrics, RequestMetrics
from quire_server.metrics.metric_values import Counter, Histogram
from quire_server.metrics.occupancy import Occupancy, StaticBatching
from quire_server.metrics.replica_metrics import ReplicaBoard
from quire_server.metrics.request_record import RequestBoard, RequestRow
from quire_server.metrics.samples import Sample, Window

SECONDS = 600  # seconds that are kept
MINUTE = 60.0
_LATENCY_SECONDS = 10.0
_BAR_SECONDS = 30  # seconds of the timeline for a new viewer
_LIVE_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The values of the latest second that the history does not keep."""

    frame: msgspec.Raw
    bars: list[Bar]
    requests: list[RequestRow]  # unfinished ones, then the last ended ones
    num_live: int
    alerts: list[Alert]
    replicas: ReplicaBoard | None


class History:
    """Takes a sample and makes a frame at each call of `tick`, once a second.

    Its memory is bounded; between two ticks a step costs one append, a token nothing.
    """

    def __init__(
        self,
        *,
        engine: EngineMetrics,
        requests: RequestMetrics,
        rejected: Counter,
        stalls: Histogram,
        occupancy: Occupancy,
        static: StaticBatching,
        board: RequestBoard,
        gpu: Callable[[], GpuUse | None] = lambda: None,
    ) -> None:
        self.block_size = 1
        self.max_model_len = 1
        self.num_engines: Callable[[], int] = lambda: 1
        self.replicas: Callable[[], ReplicaBoard | None] = lambda: None  # set where there are some
        self._engine = engine
        self._requests = requests
        self._rejected = rejected
        self._stalls = stalls
        self._occupancy = occupancy
        self._static = static
        self._board = board
        self._gpu = gpu
        self._rules = AlertRules()
        self._samples: deque[Sample] = deque(maxlen=SECONDS + 1)
        self._frames: deque[bytes] = deque(maxlen=SECONDS)
        self._bars: deque[list[Bar]] = deque(maxlen=_BAR_SECONDS)
        self._peaks: deque[int] = deque(maxlen=int(MINUTE))

    def window(self, seconds: float) -> Window:
        """The last `seconds` seconds, or as many as there are. Raises IndexError before the first tick."""
        last = self._samples[-1]
        first = last
        for sample in reversed(self._samples):
            first = sample
            if last.at - sample.at >= seconds:
                break
        return Window(first=first, last=last)

    @property
    def peak(self) -> int:
        """The most KV blocks in use within the last minute."""
        return max(self._peaks, default=0)

    @property
    def static_longest(self) -> int:
        """KV blocks that static batches would hold now."""
        return self._static.kv_blocks(self.block_size)

    @property
    def static_full(self) -> int:
        """KV blocks of one slot of the longest context for each running sequence."""
        return self._engine.state.running * -(-self.max_model_len // self.block_size)

    def past(self) -> bytes:
        """JSON: all frames, oldest first, and the timeline of the last ones."""
        frames = b"[" + b",".join(self._frames) + b"]"
        timeline = msgspec.json.encode(list(self._bars))
        return b'{"frames":' + frames + b',"bars":' + timeline + b"}"

    def tick(self, now: float, t: float) -> bytes:
        """End a second, at `now` on the samples' clock and `t` since the epoch; returns the new values as JSON."""
        steps = self._engine.steps.take_last()
        if not self._samples:
            self._samples.append(self._nothing(now - 1.0))
        self._samples.append(self._sample(now))
        alerts = self._rules.look(self.window)
        encoded = msgspec.json.encode(self._frame(t, steps))
        self._frames.append(encoded)
        self._bars.append(bars(steps))
        news = Now(
            frame=msgspec.Raw(encoded),
            bars=self._bars[-1],
            requests=[*self._board.live(_LIVE_ROWS), *reversed(self._board.ended)],
            num_live=self._board.num_live,
            alerts=alerts,
            replicas=self.replicas(),
        )
        return msgspec.json.encode(news)

    def _nothing(self, at: float) -> Sample:
        """The sample before the first second: every total is 0, so that events before the first tick count."""
        last = self._sample(at)
        return Sample(at=at, ttft=(0,) * len(last.ttft), itl=(0,) * len(last.itl), stalls=(0,) * len(last.stalls))

    def _sample(self, now: float) -> Sample:
        engine, requests, occupancy = self._engine, self._requests, self._occupancy
        state = engine.state
        used = state.blocks_used / state.blocks_total if state.blocks_total else 0.0
        before = self._samples[-1] if self._samples else Sample(at=now - 1.0, ttft=(), itl=(), stalls=())
        seconds = now - before.at
        return Sample(
            at=now,
            ttft=tuple(requests.ttft.counts),
            itl=tuple(requests.itl.counts),
            stalls=tuple(self._stalls.counts),
            kv_usage_seconds=before.kv_usage_seconds + used * seconds,
            kv_waited=0.0 if state.kv_waiting_since is None else max(0.0, now - state.kv_waiting_since),
            kv_wait_seconds=engine.kv_wait_seconds.get(),
            accepted=occupancy.accepted,
            departed=occupancy.departed,
            seconds_in_system=occupancy.seconds_in_system,
            sequence_seconds=occupancy.sequence_seconds(now),
            finished=requests.finished.get("stop") + requests.finished.get("length"),
            rejected=sum(self._rejected.values.values()),
            failed=requests.finished.get("error"),
            restarts=engine.restarts.get(),
            preempted=engine.preempted.get(),
            generated=requests.generated.get(),
            steps=engine.steps.count.get(),
            busy_seconds=engine.steps.busy_seconds.get(),
            engine_seconds=before.engine_seconds + self.num_engines() * seconds,
            prefilled=engine.steps.computed.get("prefill"),
            decoded=engine.steps.computed.get("decode"),
            padded=engine.padded.get(),
            static_useful=requests.static_slots.get("useful"),
            static_padding=requests.static_slots.get("padding"),
            guessed=engine.draft_tokens.get(),
            guessed_right=engine.accepted_tokens.get(),
            undrafted=tuple([engine.undrafted.get(cause) for cause in NO_DRAFT_CAUSES]),
        )

    def _frame(self, t: float, steps: list[EngineStats]) -> Frame:
        stats, second, minute = self._engine.state, self._second(), self.window(MINUTE)
        latencies, little = self.window(_LATENCY_SECONDS), minute.little
        self._peaks.append(max([step.blocks_used for step in steps] + [stats.blocks_used]))
        return Frame(
            t=round(t, 2),
            steps=int(second.gain("steps")),
            prefill=int(second.gain("prefilled")),
            decode=int(second.gain("decoded")),
            generated=int(second.gain("generated")),
            busy=round(second.busy, 3),
            running=stats.running,
            waiting={reason: count for reason, count in stats.waiting.items() if count},
            kv_waited=round(second.last.kv_waited, 2),
            blocks=blocks(
                stats,
                peak=self._peaks[-1],
                static_longest=self.static_longest,
                static_full=self.static_full,
            ),
            ttft=_quantiles(latencies, "ttft", TTFT_SECONDS),
            itl=_quantiles(latencies, "itl", TOKEN_SECONDS),
            finished=int(second.gain("finished")),
            failed=int(second.gain("failed")),
            preempted=int(second.gain("preempted")),
            restarts=int(second.gain("restarts")),
            in_system=round(little.in_system, 3),
            arrivals=round(little.arrivals, 3),
            seconds=round(little.seconds, 4),
            residual=round(little.residual, 4),
            efficiency=round(minute.efficiency, 4),
            static_efficiency=round(minute.static_efficiency, 4) if minute.gain("static_useful") else None,
            guessed=int(second.gain("guessed")),
            guessed_right=int(second.gain("guessed_right")),
            undrafted=_most(second),
            tenants=tenant_shares(stats),
            gpu=None if (use := self._gpu()) is None else use.busy,
        )

    def _second(self) -> Window:
        """The window between the last two samples."""
        return Window(first=self._samples[-2], last=self._samples[-1])


def _most(second: Window) -> NoDraftCause | None:
    """The cause for which most slices had no guesses."""
    gains = [
        last - first for first, last in zip(second.first.undrafted or repeat(0.0), second.last.undrafted, strict=False)
    ]
    return NO_DRAFT_CAUSES[gains.index(max(gains))] if any(gains) else None


def _quantiles(window: Window, name: str, bounds: tuple[float, ...]) -> tuple[float, float, float] | None:
    p50, p95, p99 = (window.quantile(name, bounds, q) for q in (0.5, 0.95, 0.99))
    if p50 is None or p95 is None or p99 is None:
        return None
    return round(p50, 5), round(p95, 5), round(p99, 5)


MOST_BARS = 20  # most bars of a second's timeline
# Prompt tokens, generated tokens, milliseconds and number of consecutive steps.
Bar = tuple[int, int, float, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """KV blocks after the last step, except `peak`."""

    total: int
    used: int
    peak: int  # most used after any step of the second
    cached: int
    shared: int  # used blocks of two or more sequences
    unshared: int  # used blocks of one sequence
    saved: int  # blocks that sharing saves
    static_longest: int  # blocks under static batching: for each sequence the longest of its batch
    static_full: int  # blocks of one slot of the longest context per running sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """One tenant's running and waiting sequences, and its service."""

    name: str
    running: int
    waiting: int
    service: float  # since the engine's start


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One second. Counts are of the second, gauges at its end, latencies over the last ten seconds.

    Plain values with short names, since hundreds of frames are sent to a new viewer. The size does not depend on the
    load.
    """

    t: float  # seconds since the epoch
    steps: int
    prefill: int  # tokens computed
    decode: int
    generated: int
    busy: float  # share of the second that steps took, of several engines the mean
    running: int
    waiting: dict[str, int]
    kv_waited: float  # seconds that the queue's head has been waiting for KV blocks
    blocks: Blocks
    ttft: tuple[float, float, float] | None  # p50, p95, p99 in seconds; None without tokens
    itl: tuple[float, float, float] | None
    finished: int
    failed: int
    preempted: int
    restarts: int
    in_system: float  # Little's law over the last minute
    arrivals: float
    seconds: float
    residual: float
    efficiency: float
    static_efficiency: float | None  # None: no batch has ended within the last minute
    guessed: int  # tokens
    guessed_right: int
    undrafted: NoDraftCause | None  # why most slices had no guesses; None: all had, or speculation is off
    tenants: tuple[TenantShare, ...]
    gpu: float | None  # the share of the last moment in which it computed; None: it cannot be read


def bars(steps: Sequence[EngineStats]) -> list[Bar]:
    """The steps in order, in groups of consecutive ones so that there are at most `MOST_BARS`."""
    size = max(1, -(-len(steps) // MOST_BARS))
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [
        (
            sum(step.prefill_tokens for step in group),
            sum(step.decode_tokens for step in group),
            round(sum(step.step_seconds for step in group) * 1e3, 2),
            len(group),
        )
        for group in groups
    ]


def tenant_shares(stats: EngineStats) -> tuple[TenantShare, ...]:
    """The shares of the tenants in the engine's statistics."""
    return tuple(
        TenantShare(name=each.tenant, running=each.running, waiting=each.waiting, service=round(each.total_service, 1))
        for each in stats.tenants
    )


def blocks(stats: EngineStats, *, peak: int, static_longest: int, static_full: int) -> Blocks:
    """The pool at one moment."""
    return Blocks(
        total=stats.blocks_total,
        used=stats.blocks_used,
        peak=max(peak, stats.blocks_used),
        cached=stats.blocks_cached,
        shared=stats.blocks_shared,
        unshared=stats.blocks_unshared,
        saved=stats.blocks_saved,
        static_longest=static_longest,
        static_full=static_full,
    )
