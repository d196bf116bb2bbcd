"""Refuses what a full queue would refuse anyway, before anything is done for it.

Promises: nobody is refused here who could have been accepted; a refusal takes no routing, no body, no template and no
tokenizer, and reads as one that comes later. Must not know: how the queue is kept, who may ask.

Under overload most of what arrives is refused, and whatever a refusal takes is missing for those who were accepted. The
body of a refused request is left where it is: the server passes over it, and the connection serves the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.errors import QueueFull, error_body
from quire_server.http.envelopes import error_reply, is_anthropic

QUEUED_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/infill"),
    *("/v1/embeddings", "/v1/score", "/score"),
)


@dataclass(frozen=True, slots=True)
class _Route:
    """What logs and metrics call the route that would have answered."""

    path: str


class RefuseWhenFull:
    """Asks `refusal` about each request that would have to be queued; None lets it through."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        refusal: Callable[[], QueueFull | None],
        paths: Iterable[str] = QUEUED_PATHS,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._refusal = refusal
        self._routes = {root + path: _Route(path) for path in paths for root in ("", root_path)}
        self._bodies: dict[str, tuple[bytes, list[tuple[bytes, bytes]]]] = {}  # by message, which is one of few

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._routes.get(scope["path"])
            error = self._refusal() if route is not None else None
            if error is not None:
                scope["route"] = route
                await self._refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refuse(self, error: QueueFull, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic(scope):  # its body has the request's id
            await error_reply(error, scope)(scope, receive, send)
            return
        known = self._bodies.get(error.message)
        if known is None:
            body = msgspec.json.encode(error_body(error))
            head = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
            known = self._bodies[error.message] = body, head
        body, head = known
        own = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": head + own})
        await send({"type": "http.response.body", "body": body, "more_body": False})
