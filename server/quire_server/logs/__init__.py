"""Logs and traces of the server: lines on stderr, one line per request, and OpenTelemetry traces on request."""

from quire_server.logs.lines import JsonFormatter, TextFormatter
from quire_server.logs.output import Output, lost_lines, writing
from quire_server.logs.throughput import log_throughput, throughput_line

__all__ = [
    "JsonFormatter",
    "Output",
    "TextFormatter",
    "log_throughput",
    "lost_lines",
    "throughput_line",
    "writing",
]
