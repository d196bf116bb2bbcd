"""Tells who judges others by their silence whether its own process was paused: then the silence is its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_MOST_KEPT = 64  # pauses; older ones count as silence


class OwnPauses:
    """Pauses of this process (SIGSTOP, a suspended machine, a blocked event loop), seen by a watcher that looks often.

    No silence of others contains them: nothing could be heard meanwhile, and others may have been paused too. A
    process that only lacks a core now and then still counts the rest of the time, and judges a little later.
    """

    def __init__(self, period: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`period`: seconds between two looks of a process that runs."""
        self._period = period
        self._longest = max(1.0, 2 * period)  # between two looks, beyond which the process was paused
        self._clock = clock
        self._looked_at = clock()
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MOST_KEPT)  # when each ended, and its seconds

    def now(self) -> float:
        """The time, of which `silence` is told."""
        return self._clock()

    def look(self) -> None:
        """Take note of a look; call it at least once a period, also while nothing is judged."""
        now = self._clock()
        if now - self._looked_at > self._longest:
            self._pauses.append((now, now - self._looked_at - self._period))
        self._looked_at = now

    def silence(self, heard: float) -> float:
        """Seconds without a sign of life that came last at `heard`, without those in which this process was paused."""
        self.look()
        paused = sum(min(seconds, end - heard) for end, seconds in self._pauses if end > heard)
        return self._looked_at - heard - paused
