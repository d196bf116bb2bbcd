"""OpenTelemetry traces: a span for each request, with child spans for queue, prefill and decode.

Owns OpenTelemetry's SDK, which is optional; its OTEL_* variables apply. Promises: spans are made when a request has
ended and sent by a thread; a slow or broken collector costs spans and nothing else. Spans have neither text nor keys.
Must not know: routes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any

from quire_server.http.guard import Reply
from quire_server.logs.output import collector_url
from quire_server.metrics.request_record import RequestSummary, StoryTotals, totals
from quire_server.showing.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import Span

CLOSE_SECONDS = 2.0  # to send the remaining spans
_MOST_PROMPTS = 16  # most prompts of one request with child spans
OPERATIONS = {  # operations of the semantic conventions for generative models, by route
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/score": "embeddings",
    "/score": "embeddings",
    "/rerank": "embeddings",
    "/v1/rerank": "embeddings",
    "/v2/rerank": "embeddings",
    "/classify": "embeddings",
    "/v1/classify": "embeddings",
}

log = logging.getLogger("quire.tracing")


def service() -> Resource:
    """Return the resource that names this server in all that it tells a collector."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - optional

    resource = Resource.create({"service.version": VERSION})
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "quire"}))  # no variable has set it
    return resource


class Tracing:
    """Makes spans of ended requests and sends them to one collector."""

    def __init__(self, endpoint: str, *, model: str) -> None:
        # Imported here: it takes a second, and the package is optional.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._model = model
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=service(), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=collector_url("traces", endpoint)))
        )
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # log each failed batch, not each retry
        self._tracer = self._provider.get_tracer("quire", VERSION)

    def tell(self, reply: Reply, carrier: Mapping[str, str], summaries: Sequence[RequestSummary]) -> None:
        """Make the spans of a request that has ended now. Errors are logged and do not affect the request."""
        try:
            self._tell(reply, carrier, list(summaries))
        except Exception:
            log.debug("a span was not made", exc_info=True)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send the remaining spans, for at most `seconds`."""
        ending = Thread(target=self._provider.shutdown, name="traces", daemon=True)  # may block on the collector
        ending.start()
        ending.join(seconds)

    def _tell(self, reply: Reply, carrier: Mapping[str, str], summaries: list[RequestSummary]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context  # noqa: PLC0415

        now = time.time_ns()
        parent = self._propagator.extract(carrier)
        told = totals(summaries)
        operation = OPERATIONS.get(reply.route or "") if told is not None else None
        span: Span = self._tracer.start_span(
            f"{operation} {self._model}" if operation else f"{reply.method} {reply.route or 'unknown'}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_of_reply(reply) | ({} if told is None else self._of_story(told, summaries[0], operation)),
            start_time=now - int(reply.seconds * 1e9),
        )
        if reply.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span, parent)
        since = now - time.monotonic_ns()
        for number, summary in enumerate(summaries[:_MOST_PROMPTS]):
            self._tell_phases(summary, number, inside, since)
        span.end(now)

    def _of_story(self, told: StoryTotals, first: RequestSummary, operation: str | None) -> dict[str, Any]:
        """Attributes by the names of the conventions; vLLM's names for those that the conventions lack."""
        values = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": first.max_tokens,
            "gen_ai.request.choice.count": first.n if first.n > 1 else None,
            "gen_ai.response.finish_reasons": told.finish_reasons,
            "gen_ai.usage.input_tokens": told.prompt_tokens,
            "gen_ai.usage.output_tokens": told.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": told.cached_tokens,
            "gen_ai.latency.time_in_queue": told.queue_seconds,
            "gen_ai.latency.time_to_first_token": told.ttft_seconds,
            "gen_ai.latency.e2e": told.e2e_seconds,
        }
        return {name: value for name, value in values.items() if value is not None}

    def _tell_phases(self, summary: RequestSummary, number: int, inside: Context, since: int) -> None:
        """Spans of one prompt's phases; `since`: the offset from a record's clock to the time of day, in ns."""
        for name, start, end in _phases(summary):
            span: Span = self._tracer.start_span(
                name, context=inside, start_time=int(start * 1e9) + since, attributes={"quire.prompt": number}
            )
            span.end(int(max(start, end) * 1e9) + since)


def _phases(summary: RequestSummary) -> Iterator[tuple[str, float, float]]:
    queue, prefill = summary.queue_seconds, summary.prefill_seconds
    if queue is None or prefill is None:  # the engine has not scheduled it
        yield "queue", summary.started, summary.ended
        return
    admitted = summary.started + queue
    yield "queue", summary.started, admitted
    yield "prefill", admitted, admitted + prefill
    if summary.first is not None and summary.last is not None:
        yield "decode", summary.first, summary.last


def _of_reply(reply: Reply) -> dict[str, Any]:
    values = {
        "http.request.method": reply.method,
        "http.route": reply.route,
        "url.path": reply.path,
        "http.response.status_code": reply.status,
        "client.address": reply.client or None,
        "gen_ai.request.id": reply.request_id,
        "quire.key_name": reply.key_name or None,
        "error.type": str(reply.status) if reply.status >= 500 else None,
    }
    return {name: value for name, value in values.items() if value is not None}
