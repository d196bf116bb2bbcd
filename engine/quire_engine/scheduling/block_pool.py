"""The KV blocks' reference counts, and the free list that doubles as the LRU order of cached blocks.

Take, share, release and revive are O(1); a block is on the free list exactly when its count is 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire_engine.invariants import require


class BlockPool:
    """Block ids 0 .. num_blocks - 1 and a doubly linked list of the free ones, the next to be reused first."""

    __slots__ = ("_next", "_previous", "_refs", "num_blocks", "num_free", "num_saved", "num_shared")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_shared = 0  # with two references or more
        self.num_saved = 0  # references beyond each block's first: the blocks that sharing saves
        self._refs: list[int] = [0] * num_blocks
        # Entry `num_blocks` is the list's head and tail in one, so that no end is a special case. A block that is
        # in use has itself as both neighbours.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def refs(self, block: int) -> int:
        """The number of page tables that contain the block."""
        return self._refs[block]

    def take(self) -> int:
        """The next free block, now with one reference. Raises InvariantViolation when there is none."""
        block = self._next[self.num_blocks]
        require(block != self.num_blocks, "a block was taken from an empty pool")
        self._unlink(block)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference; a free block leaves the free list."""
        refs = self._refs[block]
        if refs == 0:
            self._unlink(block)
        else:
            self.num_saved += 1
            self.num_shared += refs == 1
        self._refs[block] = refs + 1

    def drop(self, block: int) -> bool:
        """One reference less; True when none is left, and then the caller must `free_first` or `free_last` it."""
        refs = self._refs[block] - 1
        require(refs >= 0, f"block {block} was released more often than it was taken")
        self._refs[block] = refs
        if refs > 0:
            self.num_saved -= 1
            self.num_shared -= refs == 1
        return refs == 0

    def free_first(self, block: int) -> None:
        """Put an unreferenced block at the front of the free list: its content is not worth keeping."""
        self._link(block, before=self._next[self.num_blocks])

    def free_last(self, block: int) -> None:
        """Put an unreferenced block at the end of the free list: its content may be matched again."""
        self._link(block, before=self.num_blocks)

    def free_blocks(self) -> Iterator[int]:
        """The free blocks in the order in which they would be reused."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def check(self) -> None:
        """Raise InvariantViolation unless list, counts and totals agree."""
        listed: set[int] = set()
        for block in self.free_blocks():
            require(block not in listed, f"block {block} is twice on the free list")
            require(self._refs[block] == 0, f"block {block} is free and has {self._refs[block]} references")
            require(self._previous[self._next[block]] == block, f"the free list is torn at block {block}")
            listed.add(block)
        require(len(listed) == self.num_free, f"{len(listed)} blocks are listed as free, {self.num_free} are counted")
        unreferenced = sum(1 for refs in self._refs if refs == 0)
        require(unreferenced == self.num_free, f"{unreferenced} blocks have no reference, {self.num_free} are free")
        shared = [refs for refs in self._refs if refs > 1]
        require(len(shared) == self.num_shared, f"{len(shared)} blocks are shared, {self.num_shared} are counted")
        saved = sum(shared) - len(shared)
        require(saved == self.num_saved, f"{saved} blocks are saved, {self.num_saved} are counted")

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = block
        self.num_free -= 1

    def _link(self, block: int, *, before: int) -> None:
        require(self._next[block] == block, f"block {block} was freed twice")
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = block
        self._previous[block], self._next[block] = previous, before
        self.num_free += 1
