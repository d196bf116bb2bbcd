"""Formats a log record as a line: text for people, or one JSON object.

Promises: one line per record whatever a client sent, of bounded length, without terminal control characters; a
request's lines have its id. Prompts and keys are never logged.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

Form = Literal["text", "json"]

MOST_CHARACTERS = 16_384  # most characters of a message; a traceback keeps its end, which has the error
_FIELDS = ("request_id", "client", "status", "key_name")  # attributes that callers may set with `extra`
_OURS = {"uvicorn.error": "quire.http"}  # names of the HTTP library's loggers in our lines
# Control characters, line ends of Unicode, and marks that change the direction of text.
_HIDDEN = (
    *(*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029),
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF),
)
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN}


def shown(text: str) -> str:
    """The text on one line, safe for a terminal."""
    return text.translate(_ESCAPES)


def _cut(text: str, *, keep_end: bool = False) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return "… " + text[-MOST_CHARACTERS:] if keep_end else text[:MOST_CHARACTERS] + " …"


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO quire.access: GET /v1/models 200 1 ms [request id]`.

    The lines of a traceback follow, indented, so that none of them can be taken for a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        message = shown(_cut(record.getMessage()))
        request_id = getattr(record, "request_id", None)
        suffix = f" [{request_id}]" if request_id else ""
        logger = _OURS.get(record.name, record.name)
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {logger}: {message}{suffix}"
        if record.exc_info:
            trace = _cut(self.formatException(record.exc_info), keep_end=True)
            line += "".join(f"\n    {shown(each)}" for each in trace.split("\n"))
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and the request's attributes.

    `extra={"told": {...}}` adds further fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        values: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": _OURS.get(record.name, record.name),
            "message": _cut(record.getMessage()),
        }
        for name in _FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                values[name] = value
        values.update(getattr(record, "told", {}))
        if record.exc_info:
            values["exception"] = _cut(self.formatException(record.exc_info), keep_end=True)
        return json.dumps(values, ensure_ascii=True, default=str)


def formatter_for(form: Form) -> logging.Formatter:
    """The formatter for text or JSON."""
    return JsonFormatter() if form == "json" else TextFormatter()


def encoded(line: str) -> bytes:
    """The line with its end; a lone surrogate, which a client can send, is escaped."""
    return (line + "\n").encode("utf-8", "backslashreplace")
