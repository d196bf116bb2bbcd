"""Which requests are unfinished at their deadline.

Owns the deadlines of live requests. Promises: each is told once, none early; what a request that ended has left here is
bounded by those that live. Must not know: clocks, what becomes of those that are told.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush

from quire_engine.types import GenerationRequest

_FEW = 64  # entries of requests that have ended: not worth a look


class Deadlines:
    """The earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request: GenerationRequest, live: Collection[str]) -> None:
        """Watch a request, where it has a deadline. `live` are the ids of all that are unfinished."""
        if request.deadline is None:
            return
        if len(self._heap) > 2 * len(live) + _FEW:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)
        heappush(self._heap, (request.deadline, request.request_id))

    def due(self, now: float) -> list[str]:
        """The ids of those whose time is over; of requests that have ended, too."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heappop(self._heap)[1])
        return due
