"""The KV blocks' reference counts and owners: free ones, and cached ones in the order in which they are evicted.

Take, share, release and revive are O(1) with one owner; see `CacheShares` for several.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from quire_engine.contract.invariants import InvariantViolation, require, require_same
from quire_engine.scheduling.cache_shares import CacheShares, Owner, PinnedBlocks


class BlockPool:
    """Block ids 0 .. num_blocks - 1. Each is in use, cached by its owner, or free: without content and owner."""

    __slots__ = ("_free", "_owner_of", "_refs", "num_blocks", "num_free", "num_saved", "num_shared", "pins", "shares")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks  # without a reference: free or cached
        self.num_shared = 0  # with two references or more
        self.num_saved = 0  # references beyond each block's first: the blocks that sharing saves
        self.shares: CacheShares[int] = CacheShares(num_blocks)
        self.pins = PinnedBlocks(self.shares, num_blocks)
        self._refs = array("i", [0]) * num_blocks  # no list, so that numpy reads it in place
        self._owner_of: list[Owner[int] | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the next to be taken last

    def refs(self, block: int) -> int:
        """The number of page tables that contain the block."""
        return self._refs[block]

    def references(self) -> dict[int, int]:
        """`refs` of every block that is in a page table."""
        return {block: refs for block, refs in enumerate(self._refs) if refs}

    def free_runs(self) -> npt.NDArray[np.int64]:
        """The lengths of all runs of neighbouring blocks without a reference; O(num_blocks)."""
        used = np.ones(self.num_blocks + 2, dtype=np.bool_)  # with a neighbour before the first and after the last
        np.not_equal(np.frombuffer(self._refs, dtype=np.intc), 0, out=used[1:-1])
        edges = np.flatnonzero(used[1:] != used[:-1])  # where a run begins, and where it ends, in turn
        return edges[1::2] - edges[::2]

    def owner(self, block: int) -> Owner[int] | None:
        """The owner of the block's content; None for a free block."""
        return self._owner_of[block]

    @property
    def num_blank(self) -> int:
        """Blocks without content, which can be taken without a loss for anybody."""
        return len(self._free)

    @property
    def is_full(self) -> bool:
        """Whether a cached block must be evicted before one can be taken."""
        return not self._free

    def evict(self, taker: Owner[int] | None) -> tuple[int, Owner[int]]:
        """Free the next cached block for an owner that takes it; returns it with the owner that had it.

        Raises InvariantViolation when no block is cached.
        """
        block, owner = self.shares.evict(taker)
        self.pins.drop(block, is_evicted=True)
        self._owner_of[block] = None
        self._free.append(block)
        return block, owner

    def take(self, owner: Owner[int] | None = None) -> int:
        """A free block, now with one reference, for an owner; without one, for that of requests without a scope.

        Raises InvariantViolation when no block is free.
        """
        require(bool(self._free), "a block was taken from an empty pool")
        block = self._free.pop()
        self.num_free -= 1
        if owner is None:
            owner = self.shares.owner("")
        self.shares.hold(owner)
        self._owner_of[block] = owner
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block in use, or to a cached one."""
        refs = self._refs[block]
        if refs == 0:
            self.shares.use(block, self._owned(block))
            self.num_free -= 1
        else:
            self.num_saved += 1
            self.num_shared += refs == 1
        self._refs[block] = refs + 1

    def drop(self, block: int) -> bool:
        """One reference less; True when none is left, and then the caller must `free` or `keep` it."""
        refs = self._refs[block] - 1
        require(refs >= 0, f"block {block} was released more often than it was taken")
        self._refs[block] = refs
        if refs > 0:
            self.num_saved -= 1
            self.num_shared -= refs == 1
        return refs == 0

    def free(self, block: int) -> None:
        """Free an unreferenced block, whose content is not worth keeping: it is taken next."""
        owner = self._owned(block)
        require(not owner.has(block), "a cached block was freed twice")
        self.pins.drop(block)
        self.shares.drop(owner)
        self._owner_of[block] = None
        self._free.append(block)
        self.num_free += 1

    def keep(self, block: int) -> None:
        """Cache an unreferenced block, whose content may be matched again: of its owner's it is evicted last."""
        self.shares.keep(block, self._owned(block))
        self.num_free += 1

    def adopt(self, owners: Mapping[int, Owner[int]]) -> None:
        """Cache these free blocks for their owners: contents of an earlier run, each of which is evicted in order."""
        self._free = [block for block in self._free if block not in owners]
        for block, owner in owners.items():
            self.shares.hold(owner)
            self._owner_of[block] = owner
            self.shares.keep(block, owner)

    def forget(self, block: int) -> None:
        """Free a cached block: its content can no longer be matched."""
        self.share(block)
        self.drop(block)
        self.free(block)

    def pin(self, blocks: Iterable[int], seconds: float) -> None:
        """Pin blocks that are in use, for so long; `PinnedBlocks.pin`."""
        owned = ((block, self._owner_of[block]) for block in blocks)
        self.pins.pin(((block, owner) for block, owner in owned if owner is not None), seconds)

    def keep_only(self, is_known: Callable[[int], bool]) -> int:
        """Free the cached blocks whose content is not known any more, after those that are free; returns how many."""
        gone = [block for block in self.shares.cached() if not is_known(block)]
        free, self._free = self._free, []
        for block in reversed(gone):
            self.forget(block)
        self._free += free
        return len(gone)

    def check(self) -> None:
        """Raise InvariantViolation unless lists, owners, counts and totals agree."""
        free, cached = set(self._free), set(self.shares.cached())
        listed = len(self._free) + self.shares.num_cached
        require(len(free | cached) == listed, "a block is twice among the free and the cached ones")
        unowned = {block for block, owner in enumerate(self._owner_of) if owner is None}
        require_same(unowned, free, "blocks are free and have an owner, or neither")
        unused = {block for block, refs in enumerate(self._refs) if not refs}
        require_same(unused, free | cached, "blocks are lost, or both free and in use")
        its = {block for block, owner in enumerate(self._owner_of) if owner is not None and owner.has(block)}
        require_same(its, cached, "blocks are cached by others than their owners")
        require(listed == self.num_free, f"{listed} blocks are listed as free, {self.num_free} are counted")
        self.shares.check([owner for owner in self._owner_of if owner is not None])
        self.pins.check()
        shared = [refs for refs in self._refs if refs > 1]
        require(len(shared) == self.num_shared, f"{len(shared)} blocks are shared, {self.num_shared} are counted")
        saved = sum(shared) - len(shared)
        require(saved == self.num_saved, f"{saved} blocks are saved, {self.num_saved} are counted")

    def _owned(self, block: int) -> Owner[int]:
        """The owner of a block without a reference that is not free."""
        owner = self._owner_of[block]
        if owner is None or self._refs[block]:
            raise InvariantViolation(f"block {block} was freed twice, or is in use")
        return owner
