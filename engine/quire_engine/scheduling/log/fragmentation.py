"""Samples of the pool's fragmentation: runs of free blocks, and slots of sequences without a token.

Promises: at most one look at all blocks a second; equal steps at equal times give equal samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_engine.contract.types import FREE_RUN_BOUNDS, UNUSED_SLOT_BOUNDS
from quire_engine.scheduling.decode_columns import DecodeColumns
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Sequence

_BLOCKS_A_SECOND = 50_000  # that are looked at, in less than a millisecond; a larger pool is sampled less often


class Fragmentation:
    """Totals over the samples of one pool."""

    def __init__(self, kv: KVAllocator, roster: Roster, columns: DecodeColumns) -> None:
        self._kv, self._roster, self._columns = kv, roster, columns
        self._pause = max(1.0, kv.num_blocks / _BLOCKS_A_SECOND)  # seconds between two samples
        self._looked_at = -math.inf
        self._runs = Sizes(FREE_RUN_BOUNDS)
        self._unused = Sizes(UNUSED_SLOT_BOUNDS)

    def totals(self, now: float) -> dict[str, Any]:
        """The fields of `EngineStats`. `now`: when the last step was applied; a sample is taken first if one is due."""
        if now - self._looked_at >= self._pause:
            self._looked_at = now
            self._look()
        return {
            "total_free_runs": self._runs.counts,
            "total_free_run_blocks": self._runs.total,
            "total_unused_slots": self._unused.counts,
            "total_unused_slots_sum": self._unused.total,
        }

    def _look(self) -> None:
        self._runs.add(self._kv.free_runs())
        running = self._roster.running
        if len(self._columns):
            self._unused.add(self._columns.unused_slots(running))
        others = [sequence for group in self._columns.layout(running).behind for sequence in group.sequences]
        self._unused.add(np.fromiter(unused_slots(others, self._kv.block_size), dtype=np.int64))


class Sizes:
    """Counts of sizes by bounds, as a histogram has them: the last count is of those above the last bound."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.counts: tuple[int, ...] = (0,) * (len(bounds) + 1)
        self.total = 0
        self._bounds = np.array(bounds)

    def add(self, sizes: npt.NDArray[np.int64]) -> None:
        """Count these sizes too."""
        by_size = np.bincount(sizes, minlength=1)  # faster than to search for the bound of each
        up_to = by_size.cumsum()[np.minimum(self._bounds, len(by_size) - 1)]
        more = np.diff(up_to, prepend=0, append=len(sizes)).tolist()
        self.counts = tuple([count + new for count, new in zip(self.counts, more, strict=True)])
        self.total += int(sizes.sum())


def unused_slots(sequences: Iterable[Sequence], block_size: int) -> Iterator[int]:
    """Token slots without a token in the blocks of each page table of the sequences; a shared block counts once."""
    shared = set[int]()
    for sequence in sequences:
        for table in sequence.kv.tables:
            spare = table.num_slots - sequence.kv.num_computed
            if sequence.kv.shares_tail and spare:
                tail = table.block_ids[sequence.kv.num_computed // block_size]
                if tail in shared:
                    spare -= block_size - sequence.kv.num_computed % block_size
                shared.add(tail)
            yield spare
