"""Blocks of host memory, by the key of what they hold: claimed by swapped sequences, or kept while there is room.

Promises: a claimed key that is stored is not lost, and one that is not stored yet finds a block when it comes; what
nobody claims goes in the order in which it was last wanted. Must not know: devices, sequences, what keys stand for.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire_engine.invariants import require


class HostPool:
    """Block ids 0 .. num_blocks - 1. A key is in at most one block; a claim may come before the content does."""

    __slots__ = ("_block_of", "_claims", "_free", "_num_promised", "_unclaimed", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._block_of: dict[bytes, int] = {}
        self._unclaimed: dict[bytes, None] = {}  # of the stored keys; the next to be given up first
        self._claims: dict[bytes, int] = {}
        self._num_promised = 0  # claimed keys that are not stored: a block is left for each

    @property
    def num_used(self) -> int:
        """Blocks whose content somebody has claimed."""
        return len(self._block_of) - len(self._unclaimed)

    @property
    def num_cached(self) -> int:
        """Blocks whose content is kept because nothing else needs the room."""
        return len(self._unclaimed)

    @property
    def num_room(self) -> int:
        """Keys without a claim that can still get one, or that can be stored without one."""
        return len(self._free) + len(self._unclaimed) - self._num_promised

    def holds(self, key: bytes) -> bool:
        return key in self._block_of

    def block(self, key: bytes) -> int:
        """Where a stored key is. Raises KeyError."""
        return self._block_of[key]

    def is_claimed(self, key: bytes) -> bool:
        return key in self._claims

    def claim(self, key: bytes) -> None:
        """One claim more. The first one takes up room, whether the key is stored or not."""
        count = self._claims.get(key, 0)
        if count == 0:
            require(self.num_room > 0, "host blocks were promised that are not there")
            if key in self._block_of:
                del self._unclaimed[key]
            else:
                self._num_promised += 1
        self._claims[key] = count + 1

    def drop(self, key: bytes, *, keep: bool) -> None:
        """One claim less; after the last one the content is kept while there is room, or without `keep` forgotten."""
        count = self._claims[key] - 1
        if count > 0:
            self._claims[key] = count
            return
        del self._claims[key]
        if key not in self._block_of:
            self._num_promised -= 1
        elif keep:
            self._unclaimed[key] = None
        else:
            self._free.append(self._block_of.pop(key))

    def store(self, key: bytes) -> int | None:
        """A block for a key that has none; None where it is not claimed and there is no room."""
        require(key not in self._block_of, "a content is stored twice on the host")
        if key in self._claims:
            self._num_promised -= 1
        elif self.num_room < 1:
            return None
        else:
            self._unclaimed[key] = None  # the newest: it is not what goes next
        if self._free:
            block = self._free.pop()
        else:
            oldest = next(iter(self._unclaimed))
            del self._unclaimed[oldest]
            block = self._block_of.pop(oldest)
        self._block_of[key] = block
        return block

    def touch(self, key: bytes) -> None:
        """A stored key was wanted: if nobody claims it, it goes last."""
        if key in self._unclaimed:
            del self._unclaimed[key]
            self._unclaimed[key] = None

    def forget_unclaimed(self) -> tuple[int, ...]:
        """Free the blocks whose content is kept for nobody in particular; which they were."""
        blocks = tuple(self._block_of.pop(key) for key in self._unclaimed)
        self._unclaimed.clear()
        self._free += blocks
        return blocks

    def check(self, claimed: Iterable[bytes]) -> None:
        """Raise InvariantViolation unless blocks and claims agree; `claimed` has every claim once."""
        counts: dict[bytes, int] = {}
        for key in claimed:
            counts[key] = counts.get(key, 0) + 1
        require(counts == self._claims, "the claims on host blocks are not those of the swapped sequences")
        blocks = [*self._free, *self._block_of.values()]
        require(sorted(blocks) == list(range(self.num_blocks)), "the host's free and stored blocks are not its pool")
        for key in self._unclaimed:
            require(key in self._block_of and key not in self._claims, "a host block is kept and claimed at once")
        require(
            len(self._unclaimed) + sum(1 for key in self._claims if key in self._block_of) == len(self._block_of),
            "a stored host block is neither kept nor claimed",
        )
        promised = sum(1 for key in self._claims if key not in self._block_of)
        require(promised == self._num_promised, f"{promised} host blocks are owed, {self._num_promised} are counted")
        require(self.num_room >= 0, "more host blocks are promised than there are")
