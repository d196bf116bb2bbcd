"""Log lines: text for people or one JSON object per line, and the periodic line about throughput.

Promises: one line per record whatever a client sent; a request's lines carry its id.
Must not know: who logs what; prompts and keys are never passed to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Literal

from quire_server.metrics.metrics import Metrics, Throughput

_FIELDS = ("request_id", "client", "status", "key_name")  # what call sites may attach with `extra`
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
_OURS = {"uvicorn.error": "quire.http"}  # what the library that listens warns of

log = logging.getLogger("quire.stats")


def configure(level: Literal["debug", "info", "warning", "error"], form: Literal["text", "json"]) -> None:
    """Send every record of this process to stderr.

    Lines of uvicorn are ours: those on requests carry the request id, those on the start and the end say more.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # other people's libraries
    logging.getLogger("quire").setLevel(level.upper())
    # asyncio reports every slow callback at debug level, with the objects' reprs.
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO quire.access: GET /v1/models 200 1 ms [request id]`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        message = record.getMessage().translate(_CONTROL)
        request_id = getattr(record, "request_id", None)
        suffix = f" [{request_id}]" if request_id else ""
        logger = _OURS.get(record.name, record.name)
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {logger}: {message}{suffix}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and the request's fields."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        values: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": _OURS.get(record.name, record.name),
            "message": record.getMessage(),
        }
        for name in _FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                values[name] = value
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=True, default=str)


async def log_throughput(metrics: Metrics, interval: float) -> None:
    """A line every `interval` seconds while something is going on, and one when it has ended. Until cancelled.

    An interval of 0 is never.
    """
    if interval <= 0:
        return
    before, was_active = metrics.throughput(), False
    clock = time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now, elapsed = metrics.throughput(), time.monotonic() - clock
        clock += elapsed
        active = now.running + now.waiting > 0 or now.generated > before.generated or now.computed > before.computed
        if active or was_active:
            log.info("%s", throughput_line(before, now, elapsed))
        before, was_active = now, active


def throughput_line(before: Throughput, now: Throughput, seconds: float) -> str:
    """In the words that people grep the logs of LLM servers for."""
    queries = now.queries - before.queries
    hits = f"{100 * (now.hits - before.hits) / queries:.1f}%" if queries else "-"
    return (
        f"Avg prompt throughput: {(now.computed - before.computed) / seconds:.1f} tokens/s,"
        f" Avg generation throughput: {(now.generated - before.generated) / seconds:.1f} tokens/s,"
        f" Running: {now.running} reqs, Waiting: {now.waiting} reqs,"
        f" KV cache usage: {100 * now.usage:.1f}%, Prefix cache hit rate: {hits}"
    )
