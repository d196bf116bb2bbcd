"""The access log, a line per request, with times and counts collected while the request is served, and the audit log.

Promises: one line per request, with its client and its key's name, and one per order of an operator; never text, never
a key. Must not know: routes, sockets.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.http.guard import ADAPTER_PATHS, Reply, is_admin_path
from quire_server.metrics.request_record import CURRENT, RequestStory, StoryTotals

_TRACE_HEADERS = (b"traceparent", b"tracestate")

log = logging.getLogger("quire.access")
audit = logging.getLogger("quire.audit")


class StoryTeller:
    """The outermost layer: gives each request a `RequestStory`, to which the parts that serve it add records."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with story_of(scope):
            await self._app(scope, receive, send)


@contextlib.contextmanager
def story_of(scope: Scope) -> Iterator[None]:
    """A new `RequestStory` for the request of this scope, as the current one."""
    token = CURRENT.set(RequestStory(carrier=_carrier(scope)))
    try:
        yield
    finally:
        CURRENT.reset(token)


def _carrier(scope: Scope) -> dict[str, str]:
    """The headers of W3C's trace context; a header that is there twice is ignored."""
    found = [(name, value) for name, value in scope["headers"] if name in _TRACE_HEADERS]
    names = [name for name, _ in found]
    return {name.decode(): value.decode("latin-1") for name, value in found if names.count(name) == 1}


def log_reply(reply: Reply, story: StoryTotals | None, model: str) -> None:
    """Log a request that has ended; `story` is None if nothing was computed for it."""
    if not log.isEnabledFor(logging.INFO):
        return
    log.info(
        "%s %s %d %.0f ms%s%s",
        reply.method,
        reply.path,
        reply.status,
        reply.seconds * 1000,
        f" by {reply.key_name}" if reply.key_name else "",
        "" if story is None else f"; {_in_words(story)}",
        extra={
            "request_id": reply.request_id,
            "client": reply.client,
            "status": reply.status,
            "key_name": reply.key_name or None,
            "told": _fields(reply, story, model),
        },
    )


def log_order(reply: Reply, root_path: str) -> None:
    """Log an order of the operator, refused ones too; questions, by GET and HEAD, and other paths are none."""
    path = reply.path.removeprefix(root_path)
    if not is_admin_path(path) or not path.startswith(("/admin", *ADAPTER_PATHS)) or reply.method in {"GET", "HEAD"}:
        return
    by = " at ".join(filter(None, (reply.key_name, reply.client or "a Unix socket")))
    _log_order(f"{reply.method} {path}", by, reply.status, reply)


def log_signal(order: str, signal: str, status: int) -> None:
    """Log an order that came as a signal; `status` as if it had come under /admin."""
    _log_order(order, signal, status, None)


def _log_order(order: str, by: str, status: int, reply: Reply | None) -> None:
    arguments = {} if reply is None else dict(reply.arguments)
    audit.info(
        "%s%s by %s: %d",
        order,
        f" {json.dumps(arguments)}" if arguments else "",
        by,
        status,
        extra={
            "request_id": None if reply is None else reply.request_id,
            "client": None if reply is None else reply.client,
            "status": status,
            "key_name": (reply.key_name if reply is not None else "") or None,
            "told": {"order": order, "arguments": arguments, "by": by},
        },
    )


def _fields(reply: Reply, story: StoryTotals | None, model: str) -> dict[str, object]:
    fields: dict[str, object] = {
        "method": reply.method,
        "path": reply.path,
        "route": reply.route,
        "seconds": _rounded(reply.seconds),
    }
    if story is not None:
        fields |= {
            "model": model,
            "prompt_tokens": story.prompt_tokens,
            "cached_tokens": story.cached_tokens,
            "output_tokens": story.output_tokens,
            "finish_reason": ",".join(story.finish_reasons),
            "queue_seconds": _rounded(story.queue_seconds),
            "ttft_seconds": _rounded(story.ttft_seconds),
            "tpot_seconds": _rounded(story.tpot_seconds),
            "e2e_seconds": _rounded(story.e2e_seconds),
        }
    return fields


def _in_words(story: StoryTotals) -> str:
    words = [f"{story.prompt_tokens} + {story.output_tokens} tokens"]
    if story.cached_tokens:
        words.append(f"{story.cached_tokens} cached")
    words.append("/".join(story.finish_reasons))
    for name, seconds in (("queue", story.queue_seconds), ("first", story.ttft_seconds), ("each", story.tpot_seconds)):
        if seconds is not None:
            words.append(f"{name} {seconds * 1000:.0f} ms")
    return ", ".join(words)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
