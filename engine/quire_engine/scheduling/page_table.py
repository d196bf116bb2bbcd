"""Where a sequence's tokens live: position -> block and offset.

Promises: position p is in entry p // block_size at offset p % block_size; entries are physical block ids.
Must not know: who else holds the blocks, what is in them.
"""

from __future__ import annotations


class PageTable:
    """The physical blocks of one sequence, in the order of its positions."""

    __slots__ = ("block_ids", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def num_slots(self) -> int:
        """Token slots in the table's blocks."""
        return len(self.block_ids) * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def position_to_block(self, position: int) -> tuple[int, int]:
        """(index into the table, offset inside the block) of a position.

        >>> PageTable(block_size=16).position_to_block(37)
        (2, 5)
        """
        return divmod(position, self.block_size)

    def position_to_slot(self, position: int) -> tuple[int, int]:
        """(physical block, offset inside the block). Raises IndexError beyond the table."""
        index, offset = self.position_to_block(position)
        return self.block_ids[index], offset

    def clear(self) -> list[int]:
        """Empty the table and return what it held. A list lent to a step keeps its content."""
        block_ids, self.block_ids = self.block_ids, []
        return block_ids
