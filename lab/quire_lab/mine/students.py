"""A student's block pool and page table, in their own process, under the names that lessons give their methods.

Promises: a class with `take()` and `release()` and one with a lesson's `alloc()` and `free()` are judged alike. What a
class has not, such as sharing or copy on write, is not asked of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_lab.mine.process import Offer, Student, StudentError, StudentProcess
from quire_lab.mine.referee import Broken

NUM_BLOCKS = ("num_blocks", "n_blocks", "total_blocks", "max_blocks", "capacity")
BLOCK_SIZE = ("block_size", "block_tokens", "tokens_per_block")
POOL = ("pool", "block_pool", "allocator", "block_allocator")

_TAKE = ("take", "alloc", "allocate", "allocate_block")
_RELEASE = ("release", "free", "free_block")
_SHARE = ("share", "incref", "inc_ref", "add_ref", "retain", "fork")
_COUNT = ("num_free", "num_free_blocks", "free_count", "available")
_FREE = (*_COUNT, "free_blocks", "free_list", "free", "_free", "_free_list", "_free_blocks")  # a count or a collection
_COPY = ("copy_on_write", "cow", "make_writable", "ensure_writable")
_COPIES = ("num_copies", "cow_copies", "cow_count", "num_cow", "copy_count", "copies", "copied")
_HOLD = ("append_block", "add_block", "append", "add")
_HELD = ("blocks", "block_ids", "table", "entries")


def make_pool(student: StudentProcess, num_blocks: int, block_size: int) -> StudentPool:
    """The student's pool of so many blocks. Raises StudentError."""
    return StudentPool(student.fit("BlockPool", Offer(NUM_BLOCKS, num_blocks), Offer(BLOCK_SIZE, block_size)))


class StudentPool:
    """A student's pool, by the names of its methods."""

    def __init__(self, student: Student) -> None:
        """Raises StudentError where a method is missing that a pool needs."""
        self._student = student
        names = student.names()
        self.take_name = _method(names, _TAKE) or _missing("BlockPool", _TAKE)
        self.release_name = _method(names, _RELEASE) or _missing("BlockPool", _RELEASE)
        self.share_name, self.copy_name = _method(names, _SHARE), _method(names, _COPY)
        others = {self.take_name, self.release_name}
        self._free_name = _first(names, _FREE, but=others) or _missing("BlockPool", _COUNT)
        self._copies_name = _first(names, _COPIES)

    def take(self) -> int | None:
        """A free block, or None. A pool with `alloc()` may raise where no block is free."""
        try:
            block = self._student.call(self.take_name)
        except StudentError as error:
            if self.take_name == _TAKE[0] or " raised " not in str(error) or self.num_free():
                raise
            return None
        if block is not None and type(block) is not int:
            raise Broken("I2", "shape", f"{self.take_name}() must return a block's number or None, not {block!r:.60}")
        return block

    def share(self, block: int) -> None:
        """One more reference to a block in use."""
        self._student.call(self.share_name, block)

    def release(self, block: int) -> None:
        """One reference less; without any the block is free."""
        self._student.call(self.release_name, block)

    def num_free(self) -> int:
        """Blocks without a reference, as the pool counts them."""
        return free_blocks(self._student.read(self._free_name))

    def copy_on_write(self, block: int) -> int:
        """The block that an owner of this one may write to: itself, or a copy."""
        found = self._student.call(self.copy_name, block)
        new = found[0] if isinstance(found, list) and found else found
        if type(new) is not int:
            raise Broken("I3", "shape", f"{self.copy_name}({block}) must return a block's number, not {found!r:.60}")
        return new

    def num_copies(self) -> int | None:
        """Copies that the pool has counted; None: it counts none."""
        found = self._student.read(self._copies_name) if self._copies_name else None
        return None if found is None else free_blocks(found)


@dataclass(frozen=True, slots=True)
class StudentTable:
    """A student's page table; `blocks`: those that it holds, empty where it takes none."""

    student: Student
    blocks: tuple[int, ...]

    def position_to_block(self, position: int) -> object:
        """The student's own answer."""
        return self.student.call("position_to_block", position)


def make_table(student: StudentProcess, block_size: int, blocks: Sequence[int]) -> StudentTable:
    """The student's page table with these blocks, where it has a way to get them. Raises StudentError."""
    offers = [Offer(BLOCK_SIZE, block_size)]
    if "BlockPool" in student.classes():
        pool = student.fit("BlockPool", Offer(NUM_BLOCKS, 2 * max(blocks)), Offer(BLOCK_SIZE, block_size))
        offers.append(Offer(POOL, pool))
    table = student.fit("PageTable", *offers)
    names = table.names()
    for name in (name for name in _HOLD if names.get(name)):
        try:
            for block in blocks:
                table.call(name, block)
        except StudentError as error:
            if "TypeError" not in str(error):  # it adds something else than a block
                raise
        else:
            return StudentTable(table, tuple(blocks))
    if names.get("extend"):
        table.call("extend", list(blocks))
        return StudentTable(table, tuple(blocks))
    for name in (name for name in _HELD if names.get(name) is False):
        table.extend(name, tuple(blocks))
        return StudentTable(table, tuple(blocks))
    return StudentTable(table, ())


def free_blocks(value: object) -> int:
    """A count, or the length of a collection. Raises Broken for anything else."""
    if isinstance(value, list):
        return len(value)
    if type(value) is not int:
        raise Broken("I15", "shape", f"num_free must be a number of blocks, not {value!r:.60}")
    return value


def _method(names: Mapping[str, bool], wanted: Sequence[str]) -> str:
    return next((name for name in wanted if names.get(name)), "")


def _first(names: Mapping[str, bool], wanted: Sequence[str], *, but: set[str] | None = None) -> str:
    return next((name for name in wanted if name in names and name not in (but or ())), "")


def _missing(name: str, wanted: Sequence[str]) -> str:
    raise StudentError(f"{name} has no {' or '.join(wanted)}")
