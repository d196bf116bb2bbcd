"""One request's `receive` and `send`, counted and timed.

Promises: no more of a body is taken than its route's limit and the room for all bodies allow, nor for longer than its
clock; a reply that comes before its request has been read is not reset away. Must not know: routes, keys.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Send

from quire_server.errors import RequestTimeout
from quire_server.http.body_limits import BodyHold, BodyLimit

LINGER_SECONDS = 2.0
QUIET_SECONDS = 0.3  # a client that sends nothing for so long has seen the reply, or will not send more
LINGER_BYTES = 16 << 20
SPARE_BYTES = 64 << 10  # so much of a body that nobody wants is read to keep its connection


class Exchange:
    """Stands between the server's connection and the application."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        request_id: str,
        *,
        limit: BodyLimit,
        declared: int | None,
        hold: BodyHold,
        body_seconds: float,
    ) -> None:
        self.request_id = request_id
        self.status: int | None = None
        self.client_gone = False
        self.id_headers: tuple[str, ...] = ("x-request-id",)
        self._receive = receive
        self._send = send
        self._limit = limit
        self._declared = declared
        self._hold = hold
        self._body_seconds = body_seconds
        self._deadline = asyncio.get_running_loop().time() + body_seconds
        self._body_bytes = 0
        self._body_complete = False
        self._closes = False  # the connection, since too much of the body is still to come

    async def receive(self) -> Message:
        if self._body_complete or self.client_gone:
            message = await self._receive()
        else:
            try:
                async with asyncio.timeout_at(self._deadline):
                    message = await self._receive()
            except TimeoutError:
                raise RequestTimeout(f"The body took longer than {self._body_seconds:g} s to arrive.") from None
        if message["type"] == "http.disconnect":
            self.client_gone = True
        elif message["type"] == "http.request":
            arrived = len(message.get("body", b""))
            self._body_bytes += arrived
            self._body_complete = not message.get("more_body", False)
            if self._body_bytes > self._limit.max_bytes:
                self._hold.release()
                raise self._limit.too_large()
            self._hold.grow(arrived)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name in self.id_headers:
                headers[name] = self.request_id
            if self._is_far_from_read():
                self._closes = True
                headers["connection"] = "close"
        elif message["type"] == "http.response.body" and not message.get("more_body", False) and self._closes:
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def _is_far_from_read(self) -> bool:
        if self._body_complete:
            return False
        return self._declared is None or self._declared - self._body_bytes > SPARE_BYTES

    async def _linger(self) -> None:
        """Read on for a while after a refusal: closing on unread bytes would reset the connection under the reply."""
        dropped = 0
        until = asyncio.get_running_loop().time() + LINGER_SECONDS
        try:
            while dropped < LINGER_BYTES and not self._body_complete:
                quiet_at = asyncio.get_running_loop().time() + QUIET_SECONDS
                async with asyncio.timeout_at(min(until, quiet_at)):
                    message = await self._receive()
                self._body_complete = message["type"] != "http.request" or not message.get("more_body", False)
                dropped += len(message.get("body", b""))
        except TimeoutError:
            return
