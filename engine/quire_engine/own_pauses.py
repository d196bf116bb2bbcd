"""Tells who judges others by their silence whether its own process was paused: then the silence is its own."""

from __future__ import annotations

import time
from collections.abc import Callable


class OwnPauses:
    """Pauses of this process (SIGSTOP, a suspended machine, a blocked event loop), seen by a watcher that looks often.

    After one, silence is counted anew: the processes that are watched may have been paused too, and need as long as
    ever to be heard.
    """

    def __init__(self, period: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`period`: seconds between two looks of a process that runs."""
        self._longest = max(1.0, 2 * period)  # between two looks, beyond which the process was paused
        self._clock = clock
        self._looked_at = self._since = clock()

    def now(self) -> float:
        """The time, of which `silence` is told."""
        return self._clock()

    def look(self) -> None:
        """Take note of a look; call it at least once a period, also while nothing is judged."""
        now = self._clock()
        if now - self._looked_at > self._longest:
            self._since = now
        self._looked_at = now

    def silence(self, heard: float) -> float:
        """Seconds without a sign of life that came last at `heard`, without those before this process's last pause."""
        self.look()
        return self._looked_at - max(heard, self._since)
