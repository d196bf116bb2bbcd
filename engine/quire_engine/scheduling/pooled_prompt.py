"""What becomes of a prompt whose vector is wanted: the sum of its rows while they are computed, then their mean.

Promises: the same vector however the prompt was cut into slices: the sums are of whole numbers, and exact.
Must not know: how rows are computed, who is scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from quire_engine.batch import POOLED_BITS
from quire_engine.types import Pooling


class PooledPrompt:
    """One run's sum. A prompt that is preempted begins again."""

    __slots__ = ("_pooling", "_sums")

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sums: list[int] = []

    def add(self, sums: Sequence[int]) -> None:
        """The next slice's."""
        self._sums = list(map(add, self._sums, sums)) if self._sums else list(sums)

    def clear(self) -> None:
        """Nothing is computed any more."""
        self._sums = []

    def vector(self, num_tokens: int) -> tuple[float, ...]:
        """The mean of the rows that were added, of a prompt of so many tokens."""
        units = (num_tokens if self._pooling == "mean" else 1) << POOLED_BITS
        return tuple([value / units for value in self._sums])
