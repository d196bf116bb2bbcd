"""Answers HEAD wherever GET is, with the same status and headers and no body (RFC 9110, 9.3.2)."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DISCONNECT: Message = {"type": "http.disconnect"}


class HeadAsGet:
    """Answers HEAD requests by what GET would answer, up to the head.

    The route sees the client leave as soon as the head is sent, so that it ends its work on the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}
        is_answered = False

        async def receive_until_answered() -> Message:
            return _DISCONNECT if is_answered else await receive()

        async def send_head(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                is_answered = True

        try:
            await self._app(as_get, receive_until_answered, send_head)
        finally:
            if "route" in as_get:  # which logs and metrics name
                scope["route"] = as_get["route"]
