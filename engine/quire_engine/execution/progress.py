"""Progress of a long phase of the start, reported a bounded number of times.

Promises: at most a few hundred reports a phase, the last one when it is done; several threads may count.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

Tell = Callable[[str, int, int], None]  # a phase's name, bytes done, bytes in all (0: not known)

_MOST_REPORTS = 200


def tell_nobody(phase: str, done: int = 0, total: int = 0) -> None:
    """Report nothing."""


class Progress:
    """One phase: how much of it is done."""

    def __init__(self, phase: str, total: int, tell: Tell) -> None:
        self._phase, self._total, self._tell = phase, total, tell
        self._lock = Lock()
        self._done = self._told = 0
        tell(phase, 0, total)

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            self._done += count
            if self._done - self._told >= self._total / _MOST_REPORTS or self._done == self._total:
                self._told = self._done
                self._tell(self._phase, self._done, self._total)
