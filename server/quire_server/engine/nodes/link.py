"""One connection between a front and a node: bytes of a handshake, then frames.

Promises: before the handshake is through, a peer's bytes are counted and never decoded, and no more of them are read
than its next message has; afterwards a peer that sends no frames, or reads none, is cut off. Must not know: requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from quire_engine.contract.errors import ProtocolError
from quire_engine.links.handshake import Refused
from quire_engine.process.transport import Codec, FrameDecoder

MOST_UNFINISHED = 128 << 20  # bytes of frames that have begun to arrive, all connections of a node together
MOST_WAITING = 256 << 20  # bytes that wait for a peer to read them


class UnfinishedFrames:
    """The bytes of frames that have begun to arrive, over all connections that share this bound."""

    def __init__(self, most: int = MOST_UNFINISHED) -> None:
        self._most = most
        self._held: dict[Link, int] = {}

    def set(self, link: Link, num_bytes: int) -> None:
        """A connection holds so many bytes now; above the bound the one that holds most is cut off."""
        if num_bytes:
            self._held[link] = num_bytes
        else:
            self._held.pop(link, None)
        if sum(self._held.values()) > self._most:
            largest = max(self._held, key=self._held.__getitem__)
            del self._held[largest]
            largest.abort(f"unfinished frames of all connections have more than {self._most} bytes")


class Link(asyncio.Protocol):
    """One end. `exactly` and `write` for the handshake, then `begin`, and frames go to `on_frame` in order."""

    def __init__(self, *, reads: Codec, sends: Codec, unfinished: UnfinishedFrames | None = None) -> None:
        """`unfinished`: the bound that it shares with others; without it a frame's own bound holds."""
        self._unfinished = unfinished
        self.heard = time.monotonic()  # when the last bytes came
        self.why_lost = "the connection was closed"
        self.was_silent = False  # whether it was given up because no sign of life came
        self._reads, self._sends = reads, sends
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()  # of the handshake
        self._wanted = 0  # bytes of the message that is awaited
        self._message: asyncio.Future[None] | None = None
        self._decoder: FrameDecoder | None = None  # None: the handshake is not through
        self._on_frame: Callable[[Any], None] = lambda _: None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def connected(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing() and not self.lost.done()

    def write(self, message: bytes) -> None:
        """Send a message of the handshake; does nothing once the connection is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(message)

    async def exactly(self, size: int) -> bytes:
        """The next message of the handshake. Raises Refused where the peer goes away instead."""
        self._wanted, self._message = size, asyncio.get_running_loop().create_future()
        self._check_message()
        await asyncio.wait([self._message, self.lost], return_when=asyncio.FIRST_COMPLETED)
        if not self._message.done():
            raise Refused(self.why_lost)
        self._message = None
        message = bytes(self._buffer[:size])
        del self._buffer[:size]
        return message

    def begin(self, on_frame: Callable[[Any], None]) -> None:
        """The handshake is through: read frames."""
        self._on_frame, self._decoder = on_frame, FrameDecoder(self._reads)
        early, self._buffer = bytes(self._buffer), bytearray()
        if self._transport is not None:
            self._transport.resume_reading()
        if early:
            self.data_received(early)

    def send(self, frame: Any) -> None:
        """Send a frame; does nothing once the connection is lost. Raises ProtocolError for one that is too long."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(self._sends.encode(frame))
        if self._transport.get_write_buffer_size() > MOST_WAITING:
            self.abort("it does not read what it is sent")

    def abort(self, why: str) -> None:
        """End the connection at once. Idempotent; the first reason stays."""
        if not self.lost.done():
            self.why_lost = why
            self.lost.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End the connection once what waits is sent."""
        if self._transport is not None:
            self._transport.close()

    def _check_message(self) -> None:
        if self._transport is None:
            return
        if self._message is not None and not self._message.done() and len(self._buffer) < self._wanted:
            self._transport.resume_reading()
            return
        self._transport.pause_reading()  # bytes after this message are read when the sender has proven itself
        if self._message is not None and not self._message.done():
            self._message.set_result(None)

    # ---------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.lost.done():
            return
        self.heard = time.monotonic()
        if self._decoder is None:
            self._buffer += data
            self._check_message()
            return
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except ProtocolError as error:
            self.abort(f"it sent {error}")
        if self._unfinished is not None:
            self._unfinished.set(self, 0 if self.lost.done() else self._decoder.num_unfinished)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            if error is not None:
                self.why_lost = f"the connection was lost: {error}"
            self.lost.set_result(None)
        self._decoder = None  # with the bytes of an unfinished frame
        if self._unfinished is not None:
            self._unfinished.set(self, 0)
