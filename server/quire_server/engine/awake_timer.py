"""A timer that counts only the time in which this process ran.

Promises: who was paused itself (SIGSTOP, a suspended machine) gives up nobody for the time of its pause, in which the
others could do nothing either. Must not know: requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from quire_engine.own_pauses import OwnPauses

_LOOK_SECONDS = 0.5  # between two looks for a pause


class AwakeTimer:
    """Calls `call` once, after so many seconds without pauses of this process, unless it is cancelled."""

    def __init__(
        self, seconds: float, call: Callable[[], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._call = seconds, call
        self._pauses = OwnPauses(_LOOK_SECONDS, clock=clock)
        self._since = self._pauses.now()
        self._loop = asyncio.get_running_loop()
        self._handle = self._next(seconds)

    def cancel(self) -> None:
        """Call nothing any more."""
        self._handle.cancel()

    def _next(self, left: float) -> asyncio.TimerHandle:
        return self._loop.call_later(min(left, _LOOK_SECONDS), self._look)

    def _look(self) -> None:
        left = self._seconds - self._pauses.silence(self._since)
        if left > 0:
            self._handle = self._next(left)
        else:
            self._call()
