"""The input of a batch: a file with one request a line, checked as a whole before any of them is run.

Must not know: HTTP, routes.
"""

from __future__ import annotations

import math
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from quire_server.batches.records import Line, LineProblem

ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
    *("/v1/score", "/v1/rerank", "/v1/classify"),
)
MAX_LINES = 50_000
MAX_PROBLEMS = 50  # of one input file, that a batch shows
MAX_CUSTOM_ID = 512  # characters
_CHUNK = 1_000  # lines that are handed over at once


class _Request(msgspec.Struct, frozen=True):
    """A line, as far as a batch must know it."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True):
    model: str | None = None
    stream: bool | None = None


@dataclass(slots=True, kw_only=True)
class Inspection:
    """The findings of a reading of the input; `problems` is empty where all of it is right."""

    num_lines: int = 0
    model: str | None = None  # of the first line
    problems: list[LineProblem] = field(default_factory=list)

    def add(self, code: str, message: str, *, line: int | None = None, param: str | None = None) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(LineProblem(code=code, message=message, line=line, param=param))


def read_lines(
    path: Path,
    *,
    endpoint: str,
    max_lines: int | None = MAX_LINES,
    max_line_bytes: int,
    knows_model: Callable[[str | None], bool],
    found: Inspection,
    turn_seconds: float = math.inf,
) -> Iterator[list[Line]]:
    """The lines of an input file, some thousand at once; what is wrong with the file is added to `found`.

    A list has the lines of at most `turn_seconds` of reading, and may be empty where all were wrong.
    `endpoint`: of every line; empty: each line has its own. Empty lines count as lines, but not as requests. Raises
    OSError.
    """
    lines: list[Line] = []
    turn_ends = time.monotonic() + turn_seconds
    with path.open("rb") as content:
        offset, number = 0, 0
        while raw := content.readline(max_line_bytes + 1):
            number += 1
            if number == 1 and raw.startswith(BOM_UTF8):
                offset, raw = len(BOM_UTF8), raw[len(BOM_UTF8) :]
            if len(raw) > max_line_bytes and not raw.endswith(b"\n"):
                found.add("line_too_long", f"a request may take {max_line_bytes} bytes", line=number)
                return
            if raw.strip():
                found.num_lines += 1
                if max_lines is not None and found.num_lines > max_lines:
                    found.add("too_many_lines", f"a batch may have {max_lines} requests")
                    return
                request = _request(raw, number, endpoint, knows_model, found)
                if request is not None:
                    lines.append(Line(number=number, custom_id=request.custom_id, offset=offset, size=len(raw)))
            offset += len(raw)
            if len(found.problems) >= MAX_PROBLEMS:
                return
            if len(lines) >= _CHUNK or time.monotonic() >= turn_ends:
                yield lines
                lines, turn_ends = [], time.monotonic() + turn_seconds
    if lines:
        yield lines
    if not found.num_lines:
        found.add("empty_file", "the file has no requests")


def request_of(content: bytes) -> tuple[str, bytes]:
    """The endpoint and the body, its very bytes, of a line that was found right."""
    request = msgspec.json.decode(content, type=_Request)
    return request.url, bytes(request.body)


def _request(
    raw: bytes, number: int, endpoint: str, knows_model: Callable[[str | None], bool], found: Inspection
) -> _Request | None:
    try:
        request = msgspec.json.decode(raw, type=_Request)
        body = msgspec.json.decode(request.body, type=_Body)
    except msgspec.ValidationError as error:
        found.add("invalid_request", f"not a request with custom_id, method, url and body: {error}", line=number)
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found.add("invalid_json_line", f"not a JSON object: {str(error)[:200]}", line=number)
        return None
    if request.method != "POST":
        found.add("invalid_method", "the method of every request is POST", line=number, param="method")
    elif request.url not in ((endpoint,) if endpoint else ENDPOINTS):
        wanted = f"the batch is for {endpoint}" if endpoint else f"the url is one of {', '.join(ENDPOINTS)}"
        found.add("mismatched_url", wanted, line=number, param="url")
    elif body.stream:
        found.add("stream_not_supported", "requests of a batch cannot stream", line=number, param="body.stream")
    elif not knows_model(body.model):
        named = (body.model or "")[:96]
        found.add("model_not_found", f"the model '{named}' does not exist", line=number, param="body.model")
    else:
        if found.num_lines == 1:
            found.model = body.model
        return request
    return None
