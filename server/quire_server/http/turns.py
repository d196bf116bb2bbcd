"""The order in which requests with bodies begin: one in each turn of the event loop.

Promises: what costs little, such as a probe, takes no turn and waits for a few requests at most, however many have come
at once; who waits is served in order. Must not know: sockets, HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class Turns:
    """Turns of one event loop, each for one piece of work. Whatever is free at once is given without a delay.

    Tasks of an event loop advance together, a step each: of a thousand requests that begin in one turn of the loop none
    is answered before all are nearly done, and nothing else is.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._going_on: deque[Work] = deque()
        self._new: deque[Work] = deque()
        self._is_taken = False

    @property
    def num_waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._going_on) + len(self._new)

    def is_free(self) -> bool:
        """Take this turn of the loop if nobody else has: then the caller does its work now."""
        if self._is_taken:
            return False
        self._is_taken = True
        self._loop.call_soon(self._next)
        return True

    def wait(self, work: Work) -> None:
        """Have `work` called in a later turn, after all that wait already."""
        self._new.append(work)

    async def go_on(self) -> None:
        """Wait for a turn, before all that have not begun yet: what has begun holds more."""
        if self.is_free():
            return
        turn = asyncio.Event()
        self._going_on.append(turn.set)
        await turn.wait()

    def _next(self) -> None:
        self._is_taken = False
        waiting = self._going_on or self._new
        if waiting and self.is_free():
            waiting.popleft()()
