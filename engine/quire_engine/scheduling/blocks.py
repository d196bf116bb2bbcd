"""Page tables, the counts of sequences, and the values by which allocators report matches, swaps and copies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from quire_engine.contract.batch import PENDING
from quire_engine.contract.invariants import InvariantViolation
from quire_engine.contract.kv_groups import WHOLE, KVGroup
from quire_engine.scheduling.cache_shares import Owner

PASSED = 0  # in entries that hold no block, because every position in them lies behind the window; never read


class PageTable:
    """The physical blocks of one sequence in one group of layers.

    Position p is in entry p // block_size at offset p % block_size. Where the layers have a window, the first entries
    are `PASSED` as soon as it has left them. A tuple that `block_ids` returned never changes.
    """

    __slots__ = ("_blocks", "_known", "block_size", "group", "num_passed")

    def __init__(self, block_size: int, group: KVGroup = WHOLE) -> None:
        self.block_size = block_size
        self.group = group
        self.num_passed = 0  # leading entries without a block
        self._blocks: list[int] = []
        self._known: tuple[int, ...] | None = ()  # `_blocks` as a value; None: changed since

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The entries. The tuple is made anew only after a change, which a decode makes once in `block_size` steps."""
        if self._known is None:
            self._known = tuple(self._blocks)
        return self._known

    @property
    def held(self) -> tuple[int, ...]:
        """The blocks, without passed entries."""
        return self.block_ids[self.num_passed :] if self.num_passed else self.block_ids

    @property
    def num_held(self) -> int:
        return len(self._blocks) - self.num_passed

    @property
    def num_slots(self) -> int:
        """Token slots in the table's entries."""
        return len(self._blocks) * self.block_size

    def first_seen(self, num_tokens: int) -> int:
        """The first entry that rows behind `num_tokens` tokens see."""
        return self.group.first_seen(num_tokens) // self.block_size

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
        """Replace the block at `index`."""
        self._blocks[index] = block
        self._known = None

    def fill(self, entries: tuple[int, ...], num_passed: int) -> tuple[int, ...]:
        """Fill an empty table with these entries, the first of which are passed; returns the blocks it holds then."""
        self._blocks = [PASSED] * num_passed + list(entries[num_passed:])
        self._known, self.num_passed = None, num_passed
        return self.held

    def give_back(self, num_passed: int) -> tuple[int, ...]:
        """The first `num_passed` entries are passed; returns the blocks that they held."""
        given = tuple(self._blocks[self.num_passed : num_passed])
        self._blocks[self.num_passed : num_passed] = [PASSED] * len(given)
        self._known, self.num_passed = None, num_passed
        return given

    def cut(self, num_tokens: int) -> tuple[int, ...]:
        """Keep the entries for `num_tokens` tokens; returns the blocks of the others."""
        count = self.num_blocks_for(num_tokens)
        taken = tuple(self._blocks[count:])
        if taken:
            del self._blocks[count:]
            self._known = None
        return taken

    def clear(self) -> tuple[int, ...]:
        """Empty the table and return its blocks."""
        held = self.held
        self._blocks, self._known, self.num_passed = [], (), 0
        return held


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The part of a request's tokens whose KV blocks are already cached, as of the next change of the pool.

    The blocks hold the first tokens of the prompt, in the order of their positions, for the first group of layers and
    the others; entries that a group's window has passed are `PASSED`.
    """

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0  # in them, and in the tail or in `restored`
    tail: tuple[int, int] | None = None  # (block to copy, its first tokens that match)
    restored: tuple[int, ...] = ()  # host blocks with the tokens that follow; there is no tail then
    others: tuple[tuple[int, ...], ...] = ()  # of the further groups, as many as `blocks` each

    def without_tail(self, block_size: int) -> PrefixMatch:
        """The match in whole blocks alone."""
        return replace(self, num_tokens=len(self.blocks) * block_size, tail=None)


NO_MATCH = PrefixMatch()


@dataclass(frozen=True, slots=True)
class Swapped:
    """The computed tokens of a sequence whose blocks were swapped out.

    The blocks of the first `num_tokens` tokens, by their keys, in order. The keys stay claimed until the sequence runs
    again or ends.
    """

    num_tokens: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """The copies between the pool and host memory that a step makes before its first write.

    Each is (source block, target block); the fields are those of `Batch` with the same names.
    """

    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    swap_keys: tuple[bytes, ...] = ()


NO_MOVES = Moves()


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceKV:
    """The computed part of a sequence and the blocks that hold it. The allocator alone writes it."""

    tables: tuple[PageTable, ...]  # of each group of layers, the one that sees farthest first
    owner: Owner[int] | None = None  # of the blocks that it takes, by its request's scope; set when it enters
    num_computed: int = 0
    num_reserved: int = 0  # tokens for which blocks are reserved
    num_lent: int = 0  # of them, for drafts in flight
    block_hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks, as far as they were needed
    num_committed: int = 0  # leading blocks that are registered in the prefix cache
    num_certain: int = 0  # tokens with applied results, or matched in whole blocks
    num_promised: int = 0  # tokens known when it entered: other requests may wait for them
    copies_from: int | None = None  # pinned source of the copy to make before the first write
    shares_tail: bool = False  # another choice may hold its last block too: copy on write
    num_settled: int = 0  # computed tokens with applied results; counted where there is a host pool
    swapped: Swapped | None = None  # its swapped-out blocks; None: there are none, or it runs

    @property
    def table(self) -> PageTable:
        """The first group's, which has an entry for every reserved token."""
        return self.tables[0]

    @property
    def num_held(self) -> int:
        """Blocks in all tables."""
        return sum([table.num_held for table in self.tables])


class Row(SequenceKV):
    """The place of one sequence in the arrays of `RunningDecodes`, which have its counts and its newest tokens.

    Setting a count raises InvariantViolation.
    """

    __slots__ = ("_certain", "_computed", "_recent", "place")

    def __init__(
        self,
        own: SequenceKV,
        place: int,
        *,
        computed: memoryview[int],
        certain: memoryview[int],
        recent: memoryview[int],
    ) -> None:
        """`computed`, `certain`: of all places; `recent`: its own newest tokens, by position modulo their number."""
        self.place = place
        self._computed, self._certain, self._recent = computed, certain, recent
        self.tables, self.owner, self.block_hashes = own.tables, own.owner, own.block_hashes
        self.num_committed, self.num_promised, self.num_lent = own.num_committed, own.num_promised, own.num_lent
        self.copies_from, self.shares_tail, self.swapped = own.copies_from, own.shares_tail, own.swapped

    @property
    def num_computed(self) -> int:
        return self._computed[self.place]

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        raise InvariantViolation(f"{value} tokens are to count as computed of a decode that has a row")

    @property
    def num_certain(self) -> int:
        return self._certain[self.place]

    @num_certain.setter
    def num_certain(self, value: int) -> None:
        raise InvariantViolation(f"{value} tokens are to count as applied of a decode that has a row")

    num_reserved = num_computed
    num_settled = num_certain

    def known(self, token_ids: list[int]) -> list[int]:
        """Bring the sequence's own list of tokens up to date and return it."""
        while token_ids[-1] == PENDING:
            token_ids.pop()
        certain, recent = self.num_certain, self._recent
        width = len(recent)
        token_ids.extend([recent[position % width] for position in range(len(token_ids), certain + 1)])
        token_ids.extend([PENDING] * (self.num_computed - certain))
        return token_ids

    def alone(self) -> SequenceKV:
        """The counts of the sequence when it has left its row."""
        return SequenceKV(
            tables=self.tables,
            owner=self.owner,
            num_computed=self.num_computed,
            num_reserved=self.num_computed,
            block_hashes=self.block_hashes,
            num_committed=self.num_committed,
            num_certain=self.num_certain,
            num_promised=self.num_promised,
            num_settled=self.num_certain,
        )
