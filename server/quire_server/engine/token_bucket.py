"""A rate per minute, saved up for one minute at most.

Promises: what was taken beyond it is a debt that the rate pays off first. Must not know: what is taken, clocks.
"""

from __future__ import annotations

MINUTE = 60.0


class TokenBucket:
    """Full at first."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._most = per_minute
        self._level = per_minute
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much is there; more than a minute's rate is asked of a full bucket."""
        self._fill(now)
        return max(0.0, (min(amount, self._most) - self._level) * MINUTE / self._most)

    def seconds(self, amount: float) -> float:
        """In which so much comes."""
        return amount * MINUTE / self._most

    def take(self, amount: float, now: float) -> None:
        """So much is used."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + max(now - self._at, 0.0) * self._most / MINUTE)
        self._at = now
