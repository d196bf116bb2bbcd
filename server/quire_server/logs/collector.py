"""Where traces are sent, checked before anything is started.

Promises: what cannot work is one line with what would. Light to import. Must not know: spans, requests, HTTP.
"""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import urlsplit

from quire_engine.errors import ConfigError

_PARTS = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def check_tracing(endpoint: str | None) -> None:
    """Raises ConfigError where traces are wanted and cannot be."""
    if endpoint is None:
        return
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: traces are sent as OTLP over HTTP; name a URL such as"
            " http://localhost:4318/v1/traces"
        )
    if not all(map(_is_there, _PARTS)):
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'quire[otel]', or leave it out")


def traces_url(endpoint: str) -> str:
    """A collector's address alone means its path for traces, as in OTEL_EXPORTER_OTLP_ENDPOINT."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package on the way to it
        return False
