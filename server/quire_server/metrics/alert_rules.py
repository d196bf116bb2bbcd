"""The alert rules of `configs/prometheus/alerts.yml` for the dashboard, which works without Prometheus.

Owns since when each holds. Promises: names, thresholds, times and advice equal those of the file; a test compares them.
Must not know: clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire_server.metrics.metric_catalog import STALL_SECONDS, TTFT_SECONDS
from quire_server.metrics.samples import Window

Windows = Callable[[float], Window]  # the window over the last seconds, or over as many as there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Fires when `value` has been above `threshold` for `for_seconds`."""

    name: str
    severity: str
    value: Callable[[Windows], float]
    threshold: float
    for_seconds: float = 0.0
    summary: str  # a format string for the value
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A rule whose condition holds: it fires, or will fire if that lasts."""

    name: str
    severity: str
    firing: bool
    seconds: float  # for which it has held
    summary: str
    advice: str


def _quantile(windows: Windows, name: str, bounds: tuple[float, ...], q: float) -> float:
    return windows(300.0).quantile(name, bounds, q) or 0.0


RULES = (
    Rule(
        name="QuireKVCacheNearlyFull",
        severity="warning",
        value=lambda windows: windows(30.0).rate("kv_usage_seconds"),
        threshold=0.85,
        for_seconds=120.0,
        summary="KV cache {:.0%} full for 2 minutes",
        advice="Requests will wait for memory soon. Raise --kv-memory, or lower --max-num-seqs or --max-model-len.",
    ),
    Rule(
        name="QuireKVCacheFull",
        severity="critical",
        value=lambda windows: windows(30.0).rate("kv_usage_seconds"),
        threshold=0.90,
        for_seconds=30.0,
        summary="KV cache {:.0%} full",
        advice="Sequences are about to be preempted and computed again; see quire_preemptions_total.",
    ),
    Rule(
        name="QuireWaitingForKV",
        severity="warning",
        value=lambda windows: windows(60.0).rate("kv_wait_seconds"),
        threshold=0.5,
        for_seconds=60.0,
        summary="requests wait for KV memory {:.0%} of the time",
        advice="The queue stands still although there may be free slots. Raise --kv-memory, lower --max-model-len or"
        " max_tokens of the requests, or send less.",
    ),
    Rule(
        name="QuireEngineRestarted",
        severity="warning",
        value=lambda windows: windows(600.0).gain("restarts"),
        threshold=0.0,
        summary="the engine restarted {:.0f} times in 10 minutes",
        advice="Streams go on with a pause. The server's log has the engine's exit code; it gives up after"
        " --set max_engine_restarts.",
    ),
    Rule(
        name="QuireRejecting",
        severity="warning",
        value=lambda windows: windows(60.0).rate("rejected"),
        threshold=0.0,
        for_seconds=60.0,
        summary="refusing {:.2g} requests per second",
        advice="Clients get 429 or 503 with Retry-After. More replicas, or a longer --max-num-queued-reqs.",
    ),
    Rule(
        name="QuireSlowFirstToken",
        severity="warning",
        value=lambda windows: _quantile(windows, "ttft", TTFT_SECONDS, 0.95),
        threshold=5.0,
        for_seconds=300.0,
        summary="95 % of first tokens take up to {:.1f} s",
        advice="Compare quire_request_queue_time_seconds, quire_request_kv_wait_seconds and"
        " quire_request_prefill_time_seconds to see where the time goes.",
    ),
    Rule(
        name="QuireFailingRequests",
        severity="warning",
        value=lambda windows: windows(300.0).rate("failed"),
        threshold=0.0,
        for_seconds=120.0,
        summary="{:.2g} requests per second end with an error",
        advice="The server's log names each of them.",
    ),
    Rule(
        name="QuireEventLoopStalls",
        severity="warning",
        value=lambda windows: _quantile(windows, "stalls", STALL_SECONDS, 0.99),
        threshold=0.25,
        for_seconds=300.0,
        summary="the server's event loop stalls for {:.2f} s",
        advice="Every stream feels it. Look for very long prompts or a machine without free cores.",
    ),
)


class AlertRules:
    """Tracks which rules hold, and since when."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # start times of rules that hold, by name

    def look(self, windows: Windows) -> list[Alert]:
        """Evaluate the rules at the last sample. Called for each sample, so that none is missed."""
        now = windows(0.0).last.at
        alerts = []
        for rule in RULES:
            value = rule.value(windows)
            if value <= rule.threshold:
                self._since.pop(rule.name, None)
                continue
            held = now - self._since.setdefault(rule.name, now)
            alerts.append(
                Alert(
                    name=rule.name,
                    severity=rule.severity,
                    firing=held >= rule.for_seconds,
                    seconds=round(held, 1),
                    summary=rule.summary.format(value),
                    advice=rule.advice,
                )
            )
        return alerts
