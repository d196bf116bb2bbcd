"""Which event loop the commands run on: uvloop where there is one.

Promises: a factory for `asyncio.Runner`; connections are accepted as fast as the loop turns; only this module knows
uvloop. Must not know: what runs on the loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

# uvloop accepts one connection of a listening socket in a turn of the loop. A busy loop takes ten milliseconds for a
# turn, so that new clients waited for seconds behind others of the same second, while those that are connected were
# answered at once. Each name of the socket counts for itself.
_ACCEPTED_IN_A_TURN = 16


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes a new event loop."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415  # not on every platform
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


def listening_sockets(sock: socket.socket) -> list[socket.socket]:
    """The socket under as many names as the running loop needs to accept several connections in a turn.

    Whoever asks closes them all.
    """
    if not type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
        return [sock]  # asyncio accepts all that have come
    return [sock, *(sock.dup() for _ in range(_ACCEPTED_IN_A_TURN - 1))]
