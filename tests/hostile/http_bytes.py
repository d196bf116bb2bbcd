"""Requests as bytes and replies as they come, over bare sockets: what a hostile client needs and no more.

Promises: a connection does what it is told, reads or not; to make load of them costs little beside a server.
Must not know: what the server promises.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

_JSON = "Content-Type: application/json\r\n"


def post(url: str, path: str, body: Mapping[str, object], *, headers: str = "") -> bytes:
    """A whole request."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{_JSON}{headers}Content-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def address(url: str) -> tuple[str, int]:
    """Where a server listens."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80


async def connect(url: str, *, receive_bytes: int | None = None) -> socket.socket:
    """A connected socket that does not block; `receive_bytes` is how much its system takes unread."""
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address(url))
    return sock


class Exchange(asyncio.Protocol):
    """One request after another on one connection; of each reply the times and what a client goes by."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None

    async def send(self, message: bytes) -> None:
        """Until the reply has ended or the connection has. Raises ConnectionError where nothing came."""
        self.status = 0
        self.retry_seconds = 0.0
        self.num_events = 0
        self.first_at = 0.0  # when the first event came
        self.is_whole = False
        self._head = b""
        self._tail = b""
        self._left: int | None = None  # bytes of the body; None: chunked
        self._ended = asyncio.get_running_loop().create_future()
        assert self._transport is not None
        self._transport.write(message)
        await self._ended
        if not self.status:
            raise ConnectionError("the connection ended without a reply")

    def close(self) -> None:
        """At once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def connection_lost(self, _exc: Exception | None) -> None:
        self.is_open = False
        self._end()

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._take_head(head)
        if self.status == 200 and self.num_events == 0 and b"data:" in data:
            self.first_at = perf_counter()
        self.num_events += data.count(b"data:")
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self.is_whole = True
                self._end()
            return
        self._tail = (self._tail + data)[-20:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self.is_whole = b"[DONE]" in self._tail
            self._end()

    def _take_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        self.status = int(lines[0].split(b" ")[1])
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            match name.lower():
                case b"content-length":
                    self._left = int(value)
                case b"retry-after-ms":
                    self.retry_seconds = int(value) / 1000

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class Pool:
    """Kept connections to one server."""

    def __init__(self, url: str) -> None:
        self._address = address(url)
        self._idle: list[Exchange] = []

    async def take(self) -> Exchange:
        """One that is open."""
        while self._idle:
            if (exchange := self._idle.pop()).is_open:
                return exchange
        _, exchange = await asyncio.get_running_loop().create_connection(Exchange, *self._address)
        return exchange

    def give(self, exchange: Exchange) -> None:
        self._idle.append(exchange)

    def close(self) -> None:
        for exchange in self._idle:
            exchange.close()
