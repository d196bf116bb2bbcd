"""How far the engine's start has come, as a metric: beside all others, and alone while there are no others.

Promises: one name and one meaning in both. Must not know: what is loaded, who asks.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from quire_server.metrics.metric_values import Gauge, Values


def load_progress(values: Values) -> Gauge:
    """The gauge."""
    return values.gauge(
        "quire_load_progress_ratio",
        "How far the phase is that the engine's latest start is in, 0 to 1; 1 when it is ready.",
    )


def while_loading(model_name: str, ratio: float) -> tuple[bytes, str]:
    """An exposition with little more than that, and its media type."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    load_progress(Values(registry, {"model_name": model_name}, None)).set(ratio)
    return generate_latest(registry), CONTENT_TYPE_LATEST
