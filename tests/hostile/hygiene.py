"""What an error may look like: the envelope of its path, small, and silent about the inside of the server.

Promises: each fault is one line that names what was found. Must not know: which cases there are, how they are sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from hostile.case import Answer

MOST_BYTES = 2048
_INSIDE = (
    (re.compile(r"Traceback|File \"|\bline \d+, in "), "a traceback"),
    (re.compile(r"\b0x[0-9a-fA-F]{5,}"), "an address"),
    (re.compile(r"\.py\b|site-packages|(?<![\w.])/(?:home|root|tmp|usr|opt|var|proc)/\w"), "a path of the server"),
    (re.compile(r"<[\w.]+ object\b|<class |<function |<bound method"), "the repr of an object"),
    (
        re.compile(r"\b(?:pydantic|starlette|fastapi|uvicorn|torch|quire_(?:server|engine|kernels))\b"),
        "a module's name",
    ),
)
_OPENAI = {"message", "type", "param", "code"}


def faults(answer: Answer, *, path: str, sent: Iterable[str] = (), secrets: Iterable[str] = ()) -> Iterator[str]:
    """What is wrong with an error. `sent`: texts of the request that it may quote, such as a model's name."""
    text = answer.body.decode("utf-8", "replace")
    if len(answer.body) > MOST_BYTES:
        yield f"{len(answer.body)} bytes"
    if answer.header("content-type") != "application/json":
        yield f"content-type {answer.header('content-type')!r}"
    if not answer.header("x-request-id"):
        yield "no x-request-id"
    if answer.header("server"):
        yield f"names itself {answer.header('server')!r}"
    if answer.body:  # HEAD has none
        yield from _envelope(text, path)
    told = text + " ".join(f"{name}: {value}" for name, value in answer.headers)
    for secret in secrets:
        if secret in told:
            yield f"repeats {secret[:24]!r}"
    for quoted in sent:
        told = told.replace(quoted, "")
    for pattern, what in _INSIDE:
        if found := pattern.search(told):
            yield f"shows {what}: {told[max(0, found.start() - 20) : found.end() + 20]!r}"


def _envelope(text: str, path: str) -> Iterator[str]:
    try:
        value = json.loads(text)
    except ValueError:
        yield f"not JSON: {text[:60]!r}"
        return
    error = value.get("error") if isinstance(value, dict) else None
    if path.startswith("/api/"):
        if not isinstance(error, str) or set(value) != {"error", "code"}:
            yield f"not Ollama's envelope: {text[:60]!r}"
    elif not isinstance(error, dict):
        yield f"no envelope: {text[:60]!r}"
    elif path == "/v1/messages" or path.startswith("/v1/messages/"):
        if value.get("type") != "error" or not {"type", "message"} <= set(error) or "request_id" not in value:
            yield f"not Anthropic's envelope: {text[:60]!r}"
    elif set(value) != {"error"} or set(error) != _OPENAI:
        yield f"not OpenAI's envelope: {text[:60]!r}"
