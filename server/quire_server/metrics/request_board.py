"""The requests that run now and the last ones that ended, each with where its time went.

Owns that list. Promises: as many rows as asked for at most, whatever the load; a row costs nothing while nobody asks
for it. Must not know: what a request said, how it is served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MOST_ENDED = 48  # kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One request: seconds in the queue, in its prompt, in its output. Before its first token all is `waited`."""

    id: str
    at: float  # accepted, seconds since the epoch
    state: str  # "waiting" for its first token, "running", or its outcome
    n: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    waited: float  # until now, where there is no token yet; else 0
    queue: float
    kv_wait: float  # of the queue's seconds and after preemptions: for KV blocks
    prefill: float
    decode: float
    preemptions: int


class RequestBoard:
    """Rows of requests by the number that `begin` gave them."""

    def __init__(self) -> None:
        self.ended: deque[RequestRow] = deque(maxlen=MOST_ENDED)
        self._live: dict[int, Callable[[], RequestRow]] = {}
        self._number = 0

    def begin(self, row: Callable[[], RequestRow]) -> int:
        """A request was accepted; `row` tells how it is, when asked."""
        self._number += 1
        self._live[self._number] = row
        return self._number

    def end(self, number: int) -> None:
        """It ended; its row stays for a while."""
        row = self._live.pop(number, None)
        if row is not None:
            self.ended.append(row())

    def live(self, most: int) -> list[RequestRow]:
        """The oldest unfinished requests, `most` of them."""
        oldest = [row for _, row in zip(range(most), self._live.values(), strict=False)]
        return [row() for row in oldest]

    @property
    def num_live(self) -> int:
        return len(self._live)
