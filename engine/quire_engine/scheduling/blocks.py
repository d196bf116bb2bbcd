"""Where a sequence's tokens live, and the values that allocators hand on about blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


class PageTable:
    """The physical blocks of one sequence: position p is in entry p // block_size at offset p % block_size.

    What `block_ids` gave stays as it was.
    """

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


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a group's known tokens need not be computed when it enters, until blocks are next taken or freed.

    Blocks that hold the first tokens of a prompt, in the order of their positions.
    """

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0  # in them, and in the tail or in `restored`
    tail: tuple[int, int] | None = None  # a block that begins as the next one does, with so many tokens: to be copied
    restored: tuple[int, ...] = ()  # host blocks with the tokens that follow; there is no tail then

    def without_tail(self, block_size: int) -> PrefixMatch:
        """Whole blocks alone."""
        return replace(self, num_tokens=len(self.blocks) * block_size, tail=None)


NO_MATCH = PrefixMatch()


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a sequence that lost its blocks still has computed, outside of them.

    The first `num_tokens` tokens, by the keys of the blocks that hold them, in order. The keys stay claimed until the
    sequence runs again or ends.
    """

    num_tokens: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """The copies to the host and from it that a step makes before its first write.

    (source block, target block) each; the fields of `Batch` with these names.
    """

    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    swap_keys: tuple[bytes, ...] = ()


NO_MOVES = Moves()


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceKV:
    """What of a sequence is computed, and the blocks that hold it. The allocator alone writes it."""

    table: PageTable
    num_computed: int = 0
    num_reserved: int = 0  # tokens that its blocks were taken for
    block_hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks, as far as needed yet
    num_committed: int = 0  # leading blocks already offered to the prefix cache
    num_certain: int = 0  # tokens whose results were applied, or that were matched in whole blocks
    num_promised: int = 0  # tokens that it knew when it entered: others may wait for them
    copies_from: int | None = None  # the block that its next one is to be copied from before the first write; pinned
    shares_tail: bool = False  # its last block may be a sibling's too: look before the next write
    num_settled: int = 0  # computed tokens whose results were taken in; counted where there is a host pool
    swapped: Swapped | None = None  # what it has while it waits without blocks; None: nothing, or it runs
