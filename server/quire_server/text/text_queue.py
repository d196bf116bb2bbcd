"""Whose text is worked on next, and how much of it may wait: small texts first, none for ever, all within a bound.

Promises: a place is given back however its holder ends, and who is cancelled leaves the queue at once; what finds too
much waiting is refused before anything is done for it. Must not know: what the work is. For one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from quire_server.errors import NotReady

PATIENCE = 2.0  # seconds after which a text's age counts as much as its size
_BYTES_A_SECOND = 2 << 20  # about what one core tokenizes, to say when a refused client may come again
_STALE = 64  # entries of texts that have left, before they are cleared away


class TextBudget:
    """Bytes of all texts that wait or are worked on."""

    def __init__(
        self,
        max_bytes: int,
        *,
        on_change: Callable[[int, int], None] = lambda _bytes, _texts: None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is told the bytes and the number of texts whenever they change."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_texts = 0
        self._on_change = on_change
        self._on_refused = on_refused

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Counts a text of `size` bytes for as long as the block runs. Raises NotReady.

        A text that comes alone is taken whatever its size: what one request may be is bounded elsewhere.
        """
        if self.num_texts and self.num_bytes + size > self.max_bytes:
            self._on_refused()
            raise NotReady(
                "Too much text is waiting to be worked on; retry later.",
                retry_after_seconds=self.num_bytes / _BYTES_A_SECOND,
                code="text_queue_full",
            )
        self._add(size, 1)
        try:
            yield
        finally:
            self._add(-size, -1)

    def _add(self, size: int, texts: int) -> None:
        self.num_bytes += size
        self.num_texts += texts
        self._on_change(self.num_bytes, self.num_texts)


@dataclass(slots=True, kw_only=True)
class _Waiter:
    since: float
    turn: asyncio.Future[None]


class Lane:
    """Places for work of one kind. The smallest text is next; one that has waited long, every other time."""

    def __init__(self, num_places: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_free = num_places
        self._clock = clock
        self._numbers = count()
        self._waiting: dict[int, _Waiter] = {}  # by number, so in the order in which they came
        self._by_size: list[tuple[int, int]] = []  # a heap of sizes and numbers; some may have left
        self._was_oldest = False

    async def take(self, size: int) -> None:
        """Waits for a place, which `give_back` must follow."""
        if self._num_free:
            self._num_free -= 1
            return
        number = next(self._numbers)
        waiter = _Waiter(since=self._clock(), turn=asyncio.get_running_loop().create_future())
        self._waiting[number] = waiter
        heapq.heappush(self._by_size, (size, number))
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is None:
                self.give_back()  # its turn had come just then
            elif len(self._by_size) > 2 * len(self._waiting) + _STALE:
                self._by_size = [entry for entry in self._by_size if entry[1] in self._waiting]
                heapq.heapify(self._by_size)
            raise

    def give_back(self) -> None:
        """The place goes to the next one that waits."""
        if not self._waiting:
            self._num_free += 1
            self._by_size.clear()
            return
        self._waiting.pop(self._next()).turn.set_result(None)

    def _next(self) -> int:
        oldest, waiter = next(iter(self._waiting.items()))
        self._was_oldest = not self._was_oldest and self._clock() - waiter.since > PATIENCE
        if self._was_oldest:
            return oldest
        while True:
            _, number = heapq.heappop(self._by_size)
            if number in self._waiting:
                return number
