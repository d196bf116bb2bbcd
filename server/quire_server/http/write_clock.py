"""Cuts connections whose clients take too little of what waits for them.

Owns one connection's window. Promises: a client that takes nothing, or less than a least rate, is cut off when its time
is over; one that takes everything now and then is not, however slowly it does. Must not know: HTTP, what the bytes are.

Bytes wait in two places: in the transport, when the system takes no more of them, and in the system's own send queue
until the client's system has acknowledged them. How much the second may be is bounded by `bound_buffers`; so data waits
in the transport soon after a client has stopped to read, and from then on nothing is written until it is gone. The
window begins there. At its end both must have shrunk by the least rate times its length, or the connection is aborted.
What the client's system has taken counts as taken: how much of that its program has read, nobody can know here.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
from dataclasses import dataclass

log = logging.getLogger("quire.http")

HIGH_WATER_BYTES = 1  # in the transport: whatever the system does not take at once is a reason to pause
_UNSENT_BYTES = 16 << 10  # in the system's queue, beyond what is on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePace:
    """How slowly a client may take what waits for it."""

    seconds: float = 60.0  # the length of a window
    bytes_per_second: int = 64

    @property
    def least_bytes(self) -> float:
        """Of each window."""
        return self.seconds * self.bytes_per_second


class WriteClock:
    """The window of one connection."""

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
            log.warning(
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
