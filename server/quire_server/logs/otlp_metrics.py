"""OpenTelemetry metrics of requests, by the semantic conventions for generative models.

Owns the SDK's meters, which are optional; its OTEL_* variables apply. Promises: a request is recorded when it has ended
and sent by a thread; a slow or broken collector costs measurements and nothing else. Must not know: routes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from threading import Thread

from quire_server.http.guard import Reply
from quire_server.logs.output import collector_url
from quire_server.logs.tracing import CLOSE_SECONDS, OPERATIONS, service
from quire_server.metrics.request_record import RequestSummary, totals
from quire_server.showing.version import VERSION

_TOKENS = "gen_ai.client.token.usage"
_DURATION = "gen_ai.server.request.duration"
_FIRST = "gen_ai.server.time_to_first_token"
_EACH = "gen_ai.server.time_per_output_token"
# The boundaries that the conventions give.
_BOUNDARIES: dict[str, tuple[float, ...]] = {
    _TOKENS: tuple(4.0**power for power in range(14)),
    _DURATION: tuple(0.01 * 2**power for power in range(14)),
    _FIRST: (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    _EACH: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
}

log = logging.getLogger("quire.tracing")


class RequestMeters:
    """Records requests that have ended and sends the histograms to one collector."""

    def __init__(self, endpoint: str, *, model: str) -> None:
        # Imported here: it takes a second, and the package is optional.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415
        from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View  # noqa: PLC0415

        self._model = model
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=collector_url("metrics", endpoint)))
        views = [
            View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(boundaries))
            for name, boundaries in _BOUNDARIES.items()
        ]
        self._provider = MeterProvider([reader], resource=service(), shutdown_on_exit=False, views=views)
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # log each failed export, not each retry
        meter = self._provider.get_meter("quire", VERSION)
        units = {_TOKENS: "{token}", _DURATION: "s", _FIRST: "s", _EACH: "s"}
        self._histograms = {name: meter.create_histogram(name, unit=unit) for name, unit in units.items()}

    def tell(self, reply: Reply, carrier: Mapping[str, str], summaries: Sequence[RequestSummary]) -> None:  # noqa: ARG002 - of traces
        """Record a request that has ended now. Errors are logged and do not affect the request."""
        try:
            self._tell(reply, list(summaries))
        except Exception:
            log.debug("a request was not recorded", exc_info=True)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what was recorded since the last time, for at most `seconds`."""
        ending = Thread(target=self._provider.shutdown, name="meters", daemon=True)  # may block on the collector
        ending.start()
        ending.join(seconds)

    def _tell(self, reply: Reply, summaries: list[RequestSummary]) -> None:
        told = totals(summaries)
        operation = OPERATIONS.get(reply.route or "")
        if told is None or operation is None:
            return
        about = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }
        error = str(reply.status) if reply.status >= 500 else "error" if "error" in told.finish_reasons else None
        self._histograms[_DURATION].record(reply.seconds, about | ({} if error is None else {"error.type": error}))
        for kind, tokens in (("input", told.prompt_tokens), ("output", told.output_tokens)):
            self._histograms[_TOKENS].record(tokens, about | {"gen_ai.token.type": kind})
        for name, seconds in ((_FIRST, told.ttft_seconds), (_EACH, told.tpot_seconds)):
            if seconds is not None:
                self._histograms[name].record(seconds, about)
