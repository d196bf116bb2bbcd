"""A log record as a line: text for people, or one JSON object.

Promises: one line per record whatever a client sent, of bounded length, with nothing in it that steers a terminal; a
request's lines carry its id. prompts and keys are never passed to it.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

Form = Literal["text", "json"]

MOST_CHARACTERS = 16_384  # of a message; a traceback keeps its end, which says what happened
_FIELDS = ("request_id", "client", "status", "key_name")  # what call sites may attach with `extra`
_OURS = {"uvicorn.error": "quire.http"}  # what the library that listens warns of
# Control characters, line ends of Unicode, and marks that reverse what is read.
_HIDDEN = (
    *(*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029),
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF),
)
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN}


def shown(text: str) -> str:
    """The text on one line, as a terminal may be given it."""
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
    """One JSON object per line: time (UTC), level, logger, message, and what is known of the request.

    `extra={"told": {...}}` adds fields of the call site's choice.
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
    """The formatter of that name."""
    return JsonFormatter() if form == "json" else TextFormatter()


def encoded(line: str) -> bytes:
    """With its end; half of a surrogate pair, which a client can send, is written out."""
    return (line + "\n").encode("utf-8", "backslashreplace")
