"""Server-sent events over a bare ASGI reply, and the write timeout for clients that do not read."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from quire_engine.own_pauses import OwnPauses
from quire_server.errors import ApiError, ClientGone, error_body, internal_error
from quire_server.http.disconnect import until_disconnect

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

Item = TypeVar("Item")

EVENTS = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

log = logging.getLogger("quire.sse")


class Progress(Protocol):
    """Whether more items come; a plain attribute, since it is read for every token."""

    @property
    def finished(self) -> bool: ...


class EventStream(Response, Generic[Item]):
    """Sends each item, encoded by `encode` as whole frames, with one write.

    There is no status before the first frame, so that early errors are HTTP errors; later ones are sent in-band. The
    generator of items is closed when the client disconnects, and paused while the client does not read.

    The stream ends with the item after whose encoding `progress` has finished; `failure` makes the frames that end a
    stream after an error.

    `keep_alive_seconds`: `keep_alive` is sent after so much silence. It also sends the status, so that errors after it
    are in-band. 0 is never.
    """

    def __init__(
        self,
        items: AsyncGenerator[Item],
        encode: Callable[[Item], bytes],
        *,
        progress: Progress,
        failure: Callable[[ApiError], bytes],
        headers: Mapping[str, str],
        keep_alive_seconds: float,
        keep_alive: bytes = KEEP_ALIVE,
        media_type: str = EVENTS,
        on_way: Callable[[Way], None] = lambda _: None,
    ) -> None:
        """`on_way` is called before the first item is asked for, where frames can go straight to the connection."""
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._items = items
        self._encode = encode
        self._progress = progress
        self._failure = failure
        self._keep_alive_seconds = keep_alive_seconds
        self._keep_alive_frame = keep_alive
        self._on_way = on_way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = _Wire(send, self.raw_headers)
        straight = straight_writer(scope)
        if straight is not None:
            self._on_way(Way(wire, straight))
        writing = asyncio.create_task(self._write(wire))
        leaving = asyncio.create_task(until_disconnect(receive))
        tasks = [writing, leaving]
        if self._keep_alive_seconds:
            tasks.append(asyncio.create_task(self._keep_alive(wire)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if not writing.done() and not wire.is_started:
                raise ClientGone
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, wire: _Wire) -> None:
        async with aclosing(self._items) as items:
            try:
                async for item in items:
                    chunk = self._encode(item)
                    is_last = self._progress.finished
                    if chunk or is_last:
                        await wire.write(chunk, is_last=is_last)
            except ApiError as error:
                if not wire.is_started:
                    raise
                await wire.write(self._failure(error), is_last=True)
            except Exception:
                if not wire.is_started:
                    raise
                log.exception("a stream failed")
                await wire.write(self._failure(internal_error()), is_last=True)

    async def _keep_alive(self, wire: _Wire) -> None:
        """Write keep-alives into a silent stream."""
        period = self._keep_alive_seconds
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(wire.changed_at + period - loop.time(), period / 8))
            if not wire.is_writing and loop.time() - wire.changed_at >= period:
                await wire.write(self._keep_alive_frame)


# Line ends of Unicode in UTF-8, which JSON allows in texts and some clients split a stream's lines at.
_LINE_ENDS = {"\u0085".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


def escaped(chunk: bytes) -> bytes:
    """A chunk without line ends of Unicode."""
    if chunk.isascii():
        return chunk
    for raw, in_json in _LINE_ENDS.items():
        chunk = chunk.replace(raw, in_json)
    return chunk


class _Wire:
    """The reply's `send`: starts the reply with the first write, and makes one write at a time.

    Frames are JSON around ASCII, so a line end of Unicode is a part of a JSON string, and is escaped there.
    """

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.is_started = False
        self.is_ended = False
        self.changed_at = asyncio.get_running_loop().time()  # when a write last began or ended
        self._send = send
        self._headers = headers
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    def changed(self) -> None:
        """Something was written just now."""
        self.changed_at = self._loop.time()

    @property
    def is_writing(self) -> bool:
        return self._lock.locked()

    async def write(self, chunk: bytes, *, is_last: bool = False) -> None:
        async with self._lock:
            if self.is_ended:
                return
            self.changed_at = self._loop.time()
            if not self.is_started:
                self.is_started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self.is_ended = is_last
            body = escaped(chunk)
            await self._send({"type": "http.response.body", "body": body, "more_body": not self.is_ended})
            self.changed_at = self._loop.time()


_STATE, TRANSPORT = "state", "transport"


class StraightWriter:
    """Writes parts of one chunked reply, whose head is sent, into its connection at once."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, cycle: RequestResponseCycle) -> None:
        self._write, self._flow, self._cycle = transport.write, flow, cycle

    def is_clear(self) -> bool:
        """Whether a part can be written now: the client reads, and the reply has begun and has not ended."""
        cycle = self._cycle
        return (
            not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)
            and cycle.response_started
            and cycle.chunked_encoding is True
        )

    def write(self, body: bytes) -> None:
        """Write a part, which is not empty. Only after `is_clear`."""
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


def straight_writer(scope: Scope) -> StraightWriter | None:
    """The way to the connection of a request; None: it has none of ours, or a later request shares the connection."""
    transport = scope.get(_STATE, {}).get(TRANSPORT)
    protocol: Any = None if transport is None else transport.get_protocol()
    cycle = getattr(protocol, "cycle", None)
    if transport is None or cycle is None or cycle.scope is not scope or scope["method"] == "HEAD":
        return None
    return StraightWriter(transport, protocol.flow, cycle)


class Way:
    """The straight way of one stream's frames, beside its task's writes and in their order."""

    __slots__ = ("_straight", "_wire")

    def __init__(self, wire: _Wire, straight: StraightWriter) -> None:
        self._wire, self._straight = wire, straight

    def is_clear(self) -> bool:
        """Whether nothing is being written, the reply has begun, and the client reads."""
        wire = self._wire
        return wire.is_started and not wire.is_ended and not wire.is_writing and self._straight.is_clear()

    def write_now(self, chunk: bytes) -> None:
        """Write frames. Only after `is_clear`."""
        if chunk:
            self._straight.write(escaped(chunk))
            self._wire.changed()


def error_frames(error: ApiError) -> bytes:
    """The end of a failed stream of OpenAI's completions: its error, and the end mark."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n" + DONE


_pace_log = logging.getLogger("quire.http")

HIGH_WATER_BYTES = 1  # in the transport: pause as soon as the system does not accept all bytes
_TIMER_SECONDS = 0.05  # by which the event loop's timers may be early
_UNSENT_BYTES = 16 << 10  # unsent bytes in the system's send queue


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePace:
    """The slowest pace at which a client may read its reply."""

    seconds: float  # the length of a window
    bytes_per_second: int

    @property
    def least_bytes(self) -> float:
        """The fewest bytes of each window."""
        return self.seconds * self.bytes_per_second


class WriteClock:
    """The write timeout of one connection, which is aborted when its client reads too little.

    Bytes wait in two places: in the transport, when the system accepts no more of them, and in the system's own send
    queue until the client's system has acknowledged them. `bound_buffers` bounds the second. So data waits in the
    transport soon after a client has stopped reading, and then nothing is written until it is gone. The window begins
    there. At its end both together must have shrunk by the least rate times the window's length, or the connection is
    aborted; a client that reads everything from time to time is not aborted, however slow it is. Bytes that the
    client's system has acknowledged count as read.
    """

    def __init__(
        self, transport: asyncio.Transport, pace: WritePace, loop: asyncio.AbstractEventLoop, pauses: OwnPauses
    ) -> None:
        """`pauses`: of this process, in which no byte is sent."""
        self._transport = transport
        self._pace = pace
        self._loop = loop
        self._pauses = pauses
        self._began = 0.0  # of the window
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Data waits, and no more is written until it is gone."""
        if self._timer is None:
            self._waiting, self._began = waiting_bytes(self._transport), self._pauses.now()
            self._timer = self._loop.call_later(self._pace.seconds, self._end)

    @property
    def is_waiting(self) -> bool:
        """Whether data waits for the client to read."""
        return self._timer is not None

    def stop(self) -> None:
        """No data waits, or the client has disconnected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        waiting = waiting_bytes(self._transport)
        if waiting == 0:
            return
        if self._pauses.silence(self._began) < self._pace.seconds - _TIMER_SECONDS:  # this process was paused meanwhile
            self.start()
            return
        if self._waiting - waiting < self._pace.least_bytes:
            _pace_log.warning(
                "a client took %d bytes in %g s while %d waited; its connection is cut",
                max(self._waiting - waiting, 0),
                self._pace.seconds,
                waiting,
            )
            cut(self._transport)
            return
        self.start()


def cut(transport: asyncio.Transport) -> None:
    """Reset the connection, so that the system does not keep unsent data for a client that may never read."""
    peer = transport.get_extra_info("socket")
    if peer is not None and peer.fileno() >= 0:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def waiting_bytes(transport: asyncio.Transport) -> int:
    """Bytes that were written and not acknowledged, as far as the system tells."""
    waiting = transport.get_write_buffer_size()
    peer = transport.get_extra_info("socket")
    if peer is None or peer.fileno() < 0:
        return waiting
    try:
        answer = fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except OSError:  # not available on every system
        return waiting
    return waiting + int(struct.unpack("i", answer)[0])


def bound_buffers(listening: socket.socket, pace: WritePace) -> None:
    """Bound the unsent data in the system's send queues; connections inherit this from their listening socket.

    Data in flight is not bounded, because long paths need much of it.
    """
    if listening.family == socket.AF_UNIX:
        return  # the send queue of a Unix socket is short
    # TCP_USER_TIMEOUT is for data that only the system still has. It aborts connections without a log line, so it is
    # longer than the write timeout, whose first window may end just after the client's system has made room.
    wanted = {"TCP_NOTSENT_LOWAT": _UNSENT_BYTES, "TCP_USER_TIMEOUT": int(4 * pace.seconds * 1000)}
    for name, value in wanted.items():
        number = getattr(socket, name, None)
        if number is not None:
            listening.setsockopt(socket.IPPROTO_TCP, number, value)
