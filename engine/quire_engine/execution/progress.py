"""How far a long phase of the start has come, told now and then.

Promises: at most a few hundred words a phase, the last one when it is done; several threads may count.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

Tell = Callable[[str, int, int], None]  # a phase in a few words, bytes done, of how many (0: not known)

_MOST_WORDS = 200


def tell_nobody(phase: str, done: int = 0, total: int = 0) -> None:
    """Where nobody listens."""


class Progress:
    """One phase: how much of it is done."""

    def __init__(self, phase: str, total: int, tell: Tell) -> None:
        self._phase, self._total, self._tell = phase, total, tell
        self._lock = Lock()
        self._done = self._told = 0
        tell(phase, 0, total)

    def add(self, count: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done += count
            if self._done - self._told >= self._total / _MOST_WORDS or self._done == self._total:
                self._told = self._done
                self._tell(self._phase, self._done, self._total)
