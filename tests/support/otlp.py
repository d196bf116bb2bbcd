"""A small collector of OpenTelemetry: answers over HTTP as told and keeps what came."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Collector:
    """Keeps the bodies and the heads of what was posted."""

    def __init__(self, status: int = 200, pause: float = 0.0) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.bodies.append(body)
                outer.headers.append(
                    {name.lower(): value for name, value in self.headers.items()} | {"path": self.path}
                )
                time.sleep(pause)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> tuple[dict[str, object], list[object]]:
        """The resource's attributes and all spans."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        resource: dict[str, object] = {}
        spans: list[object] = []
        for body in self.bodies:
            request = ExportTraceServiceRequest()
            request.ParseFromString(body)
            for each in request.resource_spans:
                resource |= plain(each.resource.attributes)
                spans += [span for scope in each.scope_spans for span in scope.spans]
        return resource, spans


def plain(attributes: object) -> dict[str, object]:
    """Of protobuf's key-value lists."""
    found: dict[str, object] = {}
    for each in attributes:  # type: ignore[attr-defined]
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """One that runs; the test is skipped without the packages."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    pytest.importorskip("opentelemetry.sdk.trace")
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()
