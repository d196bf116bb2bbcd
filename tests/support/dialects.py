"""One text in every dialect, and the cached tokens that its reply tells: for tests of who finds whose prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

MODEL = "quire-demo"
Body = dict[str, Any]
# By name: the path, and the body for a text.
DIALECTS: dict[str, tuple[str, Callable[[str], Body]]] = {
    "completions": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 1}),
    "beams": (
        "/v1/completions",
        lambda text: {"prompt": text, "max_tokens": 2, "n": 2, "temperature": 0, "use_beam_search": True},
    ),
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
    "messages": ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
    "responses": ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 16, "store": False}),
    "embeddings": ("/v1/embeddings", lambda text: {"input": text}),
    "rerank": ("/v1/rerank", lambda text: {"query": text, "documents": ["a"]}),
    "score": ("/v1/score", lambda text: {"text_1": text, "text_2": "a"}),
}


def request_of(dialect: str, text: str, key: str, **fields: object) -> dict[str, Any]:
    """The arguments of httpx's `post`."""
    path, body = DIALECTS[dialect]
    return {"url": path, "json": {"model": MODEL, **body(text), **fields}, "headers": {"x-api-key": key}}


def cached_tokens(reply: httpx.Response) -> int:
    """The prompt tokens that the reply says were cached. Raises AssertionError for an error."""
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])
