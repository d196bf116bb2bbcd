"""Tells a client that has left from one that has only said all it wanted to say.

Promises: who still listens gets the reply; who has closed the connection is noticed about one round trip after it.
Must not know: requests beyond whether a probe may be written now, the engine.

Both look the same at first: the client's side of the connection ends. But what is written to a closed TCP connection is
answered by a reset, and then the system reports a hang-up. Before the reply has begun HTTP allows interim responses, so
a `100 Continue` is written, which clients pass over; later the reply's own parts do the same. HTTP/1.0 has no interim
responses and TLS has no half-closed connections: there, the end means that the client has left.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Literal

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_SECONDS = 5.0  # between probes: a client may also leave after it has stopped speaking
ClientSide = Literal["open", "ended", "gone"]  # ended: it has left, or said all that it wanted to say
_ENDED = getattr(select, "POLLRDHUP", 0)  # not every system tells it before it is read
_FIRST_LOOK = 0.001  # seconds after a probe; each further look comes after twice the time
_LONGEST_PAUSE = 0.25


class HalfClosedWatch:
    """Watches a connection whose client has stopped speaking, and aborts it when the client has left."""

    def __init__(self, transport: asyncio.Transport, *, may_probe: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_probe = may_probe
        self._loop = asyncio.get_running_loop()
        self._probe_at = 0.0  # the loop's time
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._look(_FIRST_LOOK)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, pause: float) -> None:
        if self._transport.is_closing():
            return
        if is_hung_up(self._transport):
            self._transport.abort()
            return
        if self._loop.time() >= self._probe_at and self._may_probe():
            self._probe_at = self._loop.time() + PROBE_SECONDS
            self._transport.write(PROBE)
            pause = _FIRST_LOOK
        self._timer = self._loop.call_later(pause, self._look, min(2 * pause, _LONGEST_PAUSE))


def is_hung_up(transport: asyncio.Transport) -> bool:
    """Whether nothing can be sent any more, as far as the system knows without trying."""
    return client_side(transport) == "gone"


def client_side(transport: asyncio.Transport) -> ClientSide:
    """As the system knows it now, which may be before the event loop has looked."""
    if transport.is_closing():
        return "gone"
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _ENDED)  # hang-ups and errors are always reported
    found = poll.poll(0)
    if not found:
        return "open"
    return "ended" if found[0][1] == _ENDED else "gone"
