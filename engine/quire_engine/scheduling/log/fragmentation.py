"""Samples of the pool's fragmentation: runs of free blocks, and slots of sequences without a token.

Promises: at most one look at all blocks a second; equal steps at equal times give equal samples.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_engine.contract.types import FREE_RUN_BOUNDS, UNUSED_SLOT_BOUNDS
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.running_decodes import RunningDecodes

_BLOCKS_A_SECOND = 50_000  # that are looked at, in less than a millisecond; a larger pool is sampled less often


class Fragmentation:
    """Totals over the samples of one pool."""

    def __init__(self, kv: KVAllocator, decodes: RunningDecodes) -> None:
        self._kv, self._decodes = kv, decodes
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
        self._unused.add(self._decodes.unused_slots())


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
