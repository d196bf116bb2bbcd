"""Replies in pieces: a small one is sent whole, a large one is rendered while it is sent.

Promises: a piece is made only when the piece before it is in the connection's buffer and while the client is connected;
other tasks run between pieces; all large replies together are bounded in bytes. Must not know: routes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from quire_server.errors import NotReady
from quire_server.http.disconnect import until_disconnect

WHOLE_BYTES = 1 << 18  # a larger reply is streamed
_CHUNK_BYTES = 1 << 16
_TURN_SECONDS = 0.005  # of rendering between two yields to the event loop
_RETRY_SECONDS = 5.0


class ReplyBudget:
    """The bytes of all large replies that are rendered or wait for their clients."""

    def __init__(
        self,
        max_bytes: int,
        *,
        on_change: Callable[[int], None] = lambda _bytes: None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called with the number of bytes whenever it changes."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._on_change = on_change
        self.on_refused = on_refused

    def hold(self) -> HeldReply:
        """A share of the budget for one reply, empty at first."""
        return HeldReply(self)

    def add(self, size: int) -> None:
        """Add bytes, or subtract them, without a check."""
        self.num_bytes += size
        self._on_change(self.num_bytes)


class HeldReply:
    """One reply's share of the budget, given back when the reply ends or is garbage-collected."""

    def __init__(self, budget: ReplyBudget) -> None:
        self._budget = budget
        self._size = 0

    def grow(self, size: int) -> None:
        """Add about `size` bytes. Raises NotReady if all replies together are too large.

        Small replies are not counted, and a reply without others is accepted whatever its size.
        """
        total = self._size + size
        if total <= WHOLE_BYTES:
            return
        others = self._budget.num_bytes - self._size
        if others and others + total > self._budget.max_bytes:
            self._budget.on_refused()
            raise NotReady(
                "Too many large replies are being sent; retry later.",
                retry_after_seconds=_RETRY_SECONDS,
                code="replies_full",
            )
        self._budget.add(total - self._size)
        self._size = total

    def release(self) -> None:
        """Give all bytes back. Idempotent."""
        size, self._size = self._size, 0
        if size:
            self._budget.add(-size)

    def __del__(self) -> None:
        self.release()


class PiecedReply(Response):
    """A reply that is rendered while it is sent. Each of `pieces` is made when it is needed and takes little time."""

    def __init__(
        self,
        pieces: Iterable[bytes],
        *,
        held: HeldReply | None = None,
        headers: Mapping[str, str] | None = None,
        media_type: str = "application/json",
    ) -> None:
        """`held` is released when the reply ends."""
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)
        self._pieces = pieces
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            pieces = iter(self._pieces)
            # HTTP/1.0 has no chunked replies, so the whole reply is needed for its length.
            most = sys.maxsize if scope["http_version"] == "1.0" else WHOLE_BYTES
            chunk = await joined(pieces, most)
            if len(chunk) < most:
                await self._send_whole(chunk, send)
            else:
                await self._stream(chunk, pieces, receive, send)
        finally:
            self._pieces = ()
            if self._held is not None:
                self._held.release()

    async def _send_whole(self, body: bytes, send: Send) -> None:
        headers = [*self.raw_headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, chunk: bytes, pieces: Iterator[bytes], receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(until_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while chunk and not leaving.done():
                for at in range(0, len(chunk), _CHUNK_BYTES):
                    await send({"type": "http.response.body", "body": chunk[at : at + _CHUNK_BYTES], "more_body": True})
                chunk = await joined(pieces, _CHUNK_BYTES)
            if not leaving.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)


async def joined(pieces: Iterator[bytes], least: int) -> bytes:
    """The next pieces, joined to at least `least` bytes if there are as many; yields to the event loop in between."""
    found: list[bytes] = []
    size, began = 0, time.perf_counter()
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= least:
            break
        if time.perf_counter() - began > _TURN_SECONDS:
            await asyncio.sleep(0)
            began = time.perf_counter()
    if size >= least:
        await asyncio.sleep(0)  # sending alone may not yield
    return b"".join(found)
