"""When a refused client should come again: a line of places in time, one behind the other, as fast as seats come free.

Owns what is measured for that: how long sequences keep their seats, and where the line ends. Promises: the same history
gives the same waits; no two refusals in a row get the same time. Must not know: requests, HTTP, clocks.
"""

from __future__ import annotations

from collections import deque

LONGEST_SECONDS = 59.0  # from 60 on, older OpenAI SDKs retry when they like, and none obeys above 120
LEAST_SECONDS = 1.0
_LONGEST_STEP_SECONDS = 4.0  # between two places, so that even a line at a crawl has some
_FIRST_GUESS_SECONDS = 3.0  # that a sequence keeps its seat, while none has ended
_SHORTEST_SECONDS = 0.001
_WINDOW_SECONDS = 30.0


class SeatMeter:
    """How fast sequences end when all seats are taken, by how long those of the last 30 seconds kept theirs.

    Counts seat-seconds rather than seconds: a server that was idle is not slow. What the taken seats have been used for
    is a pool, of which each end takes its seat's share; so the first end of many that began together speaks for all.
    """

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._taken = 0  # seats
        self._changed_at = 0.0
        self._pool = 0.0  # seat-seconds of the taken seats
        self._ended: deque[tuple[float, int, float]] = deque()  # time, sequences, their seat-seconds
        self._num_ended = 0
        self._seat_seconds = 0.0  # of those that ended

    def observe(self, now: float, *, sequences: int, ended: int = 0) -> None:
        """From now on so many sequences are unfinished, waiting ones included; `ended` have just left."""
        self._pool += self._taken * (now - self._changed_at)
        self._changed_at = now
        if ended and self._taken:
            share = self._pool * min(ended / self._taken, 1.0)
            self._pool -= share
            self._ended.append((now, ended, share))
            self._num_ended += ended
            self._seat_seconds += share
        self._taken = min(sequences, self._seats)
        self._trim(now)

    def rate(self, now: float) -> float:
        """Sequences a second, more than 0."""
        self._trim(now)
        so_far = self._pool / self._taken + now - self._changed_at if self._taken else 0.0
        if self._num_ended:
            seconds = max(self._seat_seconds / self._num_ended, so_far)
        else:
            seconds = max(_FIRST_GUESS_SECONDS, 2 * so_far)  # half of their work is done, by the usual guess
        return self._seats / max(seconds, _SHORTEST_SECONDS)

    def _trim(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - _WINDOW_SECONDS:
            _, ended, share = self._ended.popleft()
            self._num_ended -= ended
            self._seat_seconds -= share
        if not self._ended:
            self._seat_seconds = 0.0  # no rest of rounding


class RetryLine:
    """Gives each refusal its own place behind those refused before it, who have not come again yet.

    The first place is when half of the queue has drained: later than the first free seat, so that what the estimate is
    wrong by finds a place in the queue, and early enough that no seat stays empty.
    """

    def __init__(self) -> None:
        self._last_place = float("-inf")  # a time

    def wait(self, now: float, *, sequences: int, waiting: int, rate: float) -> float:
        """Seconds, `LEAST_SECONDS` to `LONGEST_SECONDS`, for a refused request of so many sequences.

        `waiting` are those in the queue, `rate` is how many leave it in a second. A line that gets too long begins
        again at its front: who finds the queue full again gets a new place by what has been measured until then.
        """
        front = now + min(max(waiting / 2 / rate, LEAST_SECONDS), LONGEST_SECONDS / 2)
        place = max(front, self._last_place + min(sequences / rate, _LONGEST_STEP_SECONDS))
        if place > now + LONGEST_SECONDS:
            place = front
        self._last_place = place
        return place - now
