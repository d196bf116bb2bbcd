"""How many sequences were in the system, how many came and went, and how long those stayed: the terms of Little's law.

Promises: who is in is counted by the places that are taken, who stayed how long by the requests' own records, so that
the two disagree when either is wrong. Must not know: clocks, the engine, what a sequence does.
"""

from __future__ import annotations


class Occupancy:
    """Totals since the start. Sequences are those of accepted requests, until the last of the request has ended."""

    def __init__(self) -> None:
        self.accepted = 0
        self.departed = 0
        self.seconds_in_system = 0.0  # of the departed, summed
        self._taken = 0
        self._changed_at = 0.0
        self._sequence_seconds = 0.0

    def occupied(self, now: float, sequences: int) -> None:
        """From now on so many places are taken."""
        self._sequence_seconds = self.sequence_seconds(now)
        self._taken, self._changed_at = sequences, now

    def sequence_seconds(self, now: float) -> float:
        """Taken places, integrated over time."""
        return self._sequence_seconds + self._taken * (now - self._changed_at)

    def arrive(self, n: int) -> None:
        self.accepted += n

    def leave(self, n: int, seconds: float) -> None:
        """The n sequences of a request ended, after so long."""
        self.departed += n
        self.seconds_in_system += n * seconds
