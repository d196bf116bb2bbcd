"""Where a sequence's tokens live: position -> block and offset.

Promises: position p is in entry p // block_size at offset p % block_size; entries are physical block ids; what
`block_ids` gave stays as it was. Must not know: who else holds the blocks, what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageTable:
    """The physical blocks of one sequence, in the order of its positions."""

    __slots__ = ("_blocks", "_known", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: list[int] = []
        self._known: tuple[int, ...] | None = ()  # `_blocks` as a value; None: changed since

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks. Made anew only after a change: a decode changes its table once in `block_size` steps."""
        if self._known is None:
            self._known = tuple(self._blocks)
        return self._known

    @property
    def num_slots(self) -> int:
        """Token slots in the table's blocks."""
        return len(self._blocks) * self.block_size

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
        return self._blocks[index], offset

    def extend(self, blocks: Iterable[int]) -> None:
        """Add blocks for the positions behind the table's."""
        self._blocks.extend(blocks)
        self._known = None

    def replace(self, index: int, block: int) -> None:
        """Put another block where the one at `index` is."""
        self._blocks[index] = block
        self._known = None

    def clear(self) -> tuple[int, ...]:
        """Empty the table and return what it held."""
        held = self.block_ids
        self._blocks, self._known = [], ()
        return held
