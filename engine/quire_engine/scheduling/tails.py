"""Which blocks begin with which tokens: where a prompt parts from what is known inside of a block, not at its end.

Owns the beginnings of the pool's blocks, of full ones and of those whose writer stopped in the middle. Promises: what
is found was computed for certain; a beginning names content alone. Must not know: reference counts, sequences.

A beginning that is found is copied, not shared: its block is full of something else behind it, or its writer goes on.
A copy reads and writes one block. That is less than the work of computing even one token in the models we serve, on a
CPU by an order of magnitude, but a copy also takes a launch, its bookkeeping on the host, and a block that cannot be
reused in that step. The first tokens of every prompt of one chat template are equal, so without a threshold every
request would copy for the two or three of them. A quarter of a block is beyond that, and scales as the copy does.
"""

from __future__ import annotations

from quire_engine.invariants import require

Beginning = tuple[bytes, tuple[int, ...]]  # the hash of all blocks before; the first `least` tokens
_MOST_EACH = 4  # blocks kept for one beginning: siblings that part later differ by a few tokens, and each is compared


def least_tail(block_size: int) -> int:
    """Tokens of a block that are worth a copy; in a block of one nothing is."""
    return max(1, block_size // 4)


def num_common(first: tuple[int, ...] | list[int], second: tuple[int, ...] | list[int]) -> int:
    """Tokens that both begin with."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


class Tails:
    """Blocks by how they begin, the last known first."""

    __slots__ = ("_blocks", "_known", "least")

    def __init__(self, block_size: int) -> None:
        self.least = least_tail(block_size)
        self._known: dict[int, tuple[Beginning, tuple[int, ...]]] = {}  # by block: its key, its computed tokens
        self._blocks: dict[Beginning, list[int]] = {}

    def holds(self, block: int) -> bool:
        """Whether the block's beginning can be found."""
        return block in self._known

    def beginning(self, parent: bytes, tokens: list[int]) -> Beginning | None:
        """The key of a block with these tokens; None if they are too few to be worth a copy."""
        return (parent, tuple(tokens[: self.least])) if len(tokens) >= self.least else None

    def offer(self, block: int, parent: bytes, tokens: list[int]) -> int | None:
        """These tokens of the block are computed, instead of what was known of it; the block that it displaces."""
        self.forget(block)
        key = self.beginning(parent, tokens)
        if key is None:
            return None
        self._known[block] = key, tuple(tokens)
        blocks = self._blocks.setdefault(key, [])
        blocks.append(block)
        if len(blocks) <= _MOST_EACH:
            return None
        displaced = blocks.pop(0)
        del self._known[displaced]
        return displaced

    def longest(self, parent: bytes, tokens: list[int]) -> tuple[int, int] | None:
        """(block, tokens) of the block that has most of these tokens at its beginning; of equals the last offered."""
        key = self.beginning(parent, tokens)
        blocks = self._blocks.get(key) if key is not None else None
        if blocks is None:
            return None
        return max(((block, num_common(self._known[block][1], tokens)) for block in reversed(blocks)), key=_length)

    def forget(self, block: int) -> bool:
        """Drop a block before it is reused; False if nothing was known of it."""
        known = self._known.pop(block, None)
        if known is None:
            return False
        blocks = self._blocks[known[0]]
        blocks.remove(block)
        if not blocks:
            del self._blocks[known[0]]
        return True

    def clear(self) -> None:
        """Drop all blocks."""
        self._known.clear()
        self._blocks.clear()

    def check(self) -> None:
        """Raise InvariantViolation unless both maps have the same blocks."""
        listed = [block for blocks in self._blocks.values() for block in blocks]
        require(sorted(listed) == sorted(self._known), "the maps of blocks' beginnings differ")
        for key, blocks in self._blocks.items():
            require(0 < len(blocks) <= _MOST_EACH, f"{len(blocks)} blocks are kept for one beginning")
            for block in blocks:
                require(self._known[block][0] == key, f"block {block} is under another beginning")


def _length(found: tuple[int, int]) -> int:
    return found[1]
