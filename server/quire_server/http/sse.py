"""Server-sent events over a bare ASGI reply, and the clock on clients that do not take what waits for them."""

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
from typing import Generic, Protocol, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from quire_server.errors import ApiError, ClientGone, error_body, internal_error
from quire_server.http.disconnect import until_disconnect

Item = TypeVar("Item")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

log = logging.getLogger("quire.sse")


class Progress(Protocol):
    """What knows whether there is more to come; a plain attribute, since it is asked for every token."""

    @property
    def finished(self) -> bool: ...


class EventStream(Response, Generic[Item]):
    """Sends each item, as the whole frames that `encode` makes of it, with one write.

    There is no status before the first frame, so that early errors are HTTP errors; later ones are sent in-band. The
    generator of items is closed when the client leaves, and not asked for more while it does not read.
    The stream ends with the item after whose encoding `progress` has finished; `failure` makes the frames with which a
    stream ends that has begun and cannot go on.
    `keep_alive_seconds`: `keep_alive` after so much silence; it also sends the status, so that errors after it are
    in-band. 0 is never.
    """

    media_type = "text/event-stream"

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
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._items = items
        self._encode = encode
        self._progress = progress
        self._failure = failure
        self._keep_alive_seconds = keep_alive_seconds
        self._sign_of_life = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        wire = _Wire(send, self.raw_headers)
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
        """Writes signs of life into a silent stream."""
        period = self._keep_alive_seconds
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(wire.changed_at + period - loop.time(), period / 8))
            if not wire.is_writing and loop.time() - wire.changed_at >= period:
                await wire.write(self._sign_of_life)


class _Wire:
    """The reply's `send`: starts it with the first write, one write at a time."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.is_started = False
        self.is_ended = False
        self.changed_at = asyncio.get_running_loop().time()  # when a write last began or ended
        self._send = send
        self._headers = headers
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

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
            await self._send({"type": "http.response.body", "body": chunk, "more_body": not self.is_ended})
            self.changed_at = self._loop.time()


def error_frames(error: ApiError) -> bytes:
    """How a stream of OpenAI's completions and chat completions ends that has failed: its error, and the end mark."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n" + DONE


_pace_log = logging.getLogger("quire.http")

HIGH_WATER_BYTES = 1  # in the transport: whatever the system does not take at once is a reason to pause
_UNSENT_BYTES = 16 << 10  # in the system's queue, beyond what is on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePace:
    """How slowly a client may take what waits for it."""

    seconds: float  # the length of a window
    bytes_per_second: int

    @property
    def least_bytes(self) -> float:
        """Of each window."""
        return self.seconds * self.bytes_per_second


class WriteClock:
    """The window of one connection: it is cut when its client takes too little of what waits for it.

    Bytes wait in two places: in the transport, when the system takes no more of them, and in the system's own send
    queue until the client's system has acknowledged them. How much the second may be is bounded by `bound_buffers`; so
    data waits in the transport soon after a client has stopped to read, and from then on nothing is written until it is
    gone. The window begins there. At its end both must have shrunk by the least rate times its length, or the
    connection is aborted; who takes everything now and then is not cut, however slowly it does. What the client's
    system has taken counts as taken: how much of that its program has read, nobody can know here.
    """

    def __init__(self, transport: asyncio.Transport, pace: WritePace, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._pace = pace
        self._loop = loop
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Data waits, and no more is written until it is gone."""
        if self._timer is None:
            self._waiting = waiting_bytes(self._transport)
            self._timer = self._loop.call_later(self._pace.seconds, self._end)

    def stop(self) -> None:
        """Nothing waits, or nobody is there to wait for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        waiting = waiting_bytes(self._transport)
        if waiting == 0:
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
    """Reset the connection: what the system still has for the client is not kept until it reads, perhaps never."""
    peer = transport.get_extra_info("socket")
    if peer is not None and peer.fileno() >= 0:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def waiting_bytes(transport: asyncio.Transport) -> int:
    """What was written and has not arrived, as far as the system tells."""
    waiting = transport.get_write_buffer_size()
    peer = transport.get_extra_info("socket")
    if peer is None or peer.fileno() < 0:
        return waiting
    try:
        answer = fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except OSError:  # not every system knows
        return waiting
    return waiting + int(struct.unpack("i", answer)[0])


def bound_buffers(listening: socket.socket, pace: WritePace) -> None:
    """Let the system keep little of what clients do not read; connections take this over from their listening socket.

    What is on its way is not bounded: over a long way it has to be much.
    """
    if listening.family == socket.AF_UNIX:
        return  # the system's queue there is short
    # The second is for what only the system still has. It ends connections without a word to the client, so the clock
    # comes first: its first window may end with a client whose system has made room once more.
    wanted = {"TCP_NOTSENT_LOWAT": _UNSENT_BYTES, "TCP_USER_TIMEOUT": int(4 * pace.seconds * 1000)}
    for name, value in wanted.items():
        number = getattr(socket, name, None)
        if number is not None:
            listening.setsockopt(socket.IPPROTO_TCP, number, value)
