"""Judges a student's file: every load against every invariant, and the pool against a count of its own.

Promises: each fault is named once, with the load or the call that shows it; a file without faults has been through all
of them, twice where it is to be the same both times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire_lab.mine.process import StudentError, StudentProcess
from quire_lab.mine.referee import Arrival, Broken, Machine, Referee, SchedulerUnderTest, same_plans
from quire_lab.mine.schedulers import PlainScheduler, StudentScheduler
from quire_lab.mine.students import StudentPool, make_pool, make_table

MACHINE = Machine(num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
POOL_CALLS, POOL_BLOCKS = 600, 16
_TABLE_SIZE, _TABLE_BLOCKS, _POSITIONS = 16, (7, 3, 11), (0, 15, 16, 37, 47)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault in a file: the invariant, the fault's short name, and where it was seen."""

    of: str  # BlockPool, PageTable or Scheduler
    invariant: str  # its number; empty where the code does not get that far
    name: str
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests, and why they are sent."""

    name: str
    arrivals: tuple[Arrival, ...]


def loads() -> Iterator[Load]:
    """The loads, each harder than the last."""
    yield Load(name="one request", arrivals=(Arrival(request_id="a", num_prompt=10, max_new_tokens=8),))
    yield Load(
        name="more requests than seats",
        arrivals=tuple(_arrival(f"r{i}", 6 + i, 4 + 2 * i) for i in range(7)),
    )
    yield Load(
        name="a prompt longer than a step",
        arrivals=(_arrival("decodes", 6, 30), _arrival("long", 70, 4, step=3), _arrival("late", 6, 6, step=4)),
    )
    yield Load(
        name="four that together outgrow the pool",
        arrivals=tuple(_arrival(name, 12, 40) for name in ("a", "b", "c", "d")),
    )
    yield Load(
        name="one that needs the whole pool, between others",
        arrivals=(_arrival("a", 8, 12), _arrival("whole", 60, 37, step=2), _arrival("b", 8, 12, step=3)),
    )
    drawn = random.Random(7)
    yield Load(
        name="forty drawn ones",
        arrivals=tuple(
            _arrival(f"r{i}", drawn.randint(1, 40), drawn.randint(1, 30), step=drawn.randint(1, 120)) for i in range(40)
        ),
    )
    short = [_arrival(f"short{i}", 4, 6, step=1 + i) for i in range(330)]
    yield Load(
        name="a long one among many short ones that come without end",
        arrivals=(*short, _arrival("long", 24, 30, step=6)),
    )


def _arrival(name: str, num_prompt: int, max_new_tokens: int, *, step: int = 1) -> Arrival:
    return Arrival(request_id=name, num_prompt=num_prompt, max_new_tokens=max_new_tokens, step=step)


def judge(path: Path, *, call_seconds: float | None = None) -> tuple[list[str], list[Fault]]:
    """The classes that the file defines, and its faults, each name once."""
    limits = {} if call_seconds is None else {"call_seconds": call_seconds}
    faults: list[Fault] = []
    with StudentProcess(path, **limits) as student:
        try:
            classes = student.classes()
        except StudentError as error:
            return [], [Fault(of="file", invariant="", name="import", said=str(error))]
    if not classes:
        said = "it defines neither a BlockPool nor a Scheduler, nor a PageTable; docs/learn.md has what they do"
        return [], [Fault(of="file", invariant="", name="empty", said=said)]
    for name in classes:
        for where, check in _CHECKS[name](path, limits):
            fault = _tried(name, where, check)
            if fault is not None and not any((fault.of, fault.name) == (one.of, one.name) for one in faults):
                faults.append(fault)
            if fault is not None and fault.name in {"raises", "shape"} and not fault.invariant:
                break  # what does not run will not run with another load
    return classes, faults


Check = Callable[[], None]


def _tried(of: str, where: str, check: Check) -> Fault | None:
    try:
        check()
    except Broken as broken:
        return Fault(of=of, invariant=broken.invariant, name=broken.fault, said=f"{broken.said} ({where})")
    except StudentError as error:
        slow = "has not answered" in str(error)
        return Fault(of=of, invariant="", name="slow" if slow else "raises", said=f"{error} ({where})")
    return None


def _scheduler_checks(path: Path, limits: dict[str, float]) -> Iterator[tuple[str, Check]]:
    for load in loads():
        yield load.name, lambda load=load: _run_twice(path, limits, load)  # type: ignore[misc]


def _run_twice(path: Path, limits: dict[str, float], load: Load) -> None:
    """Run a load in two processes: the same calls must make the same plans."""
    plans = []
    for _ in range(2):
        with StudentProcess(path, **limits) as student:
            referee = Referee(MACHINE, load.arrivals)
            referee.run(student_scheduler(student, MACHINE))
            plans.append(referee.plans)
    differs = same_plans(*plans)
    if differs is not None:
        raise Broken("I10", "differs", f"the same requests, and step {differs} is planned otherwise the second time")


def student_scheduler(student: StudentProcess, machine: Machine) -> SchedulerUnderTest:
    """The student's scheduler for this machine; of a file with a pool alone, the plain one over it."""
    if "Scheduler" in student.classes():
        made = student.make(
            "Scheduler",
            num_blocks=machine.num_blocks,
            block_size=machine.block_size,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
        )
        return StudentScheduler(made)
    return PlainScheduler(machine, make_pool(student, machine.num_blocks, machine.block_size))


def _pool_checks(path: Path, limits: dict[str, float]) -> Iterator[tuple[str, Check]]:
    def with_pool(check: Callable[[StudentPool], None]) -> Check:
        def run() -> None:
            with StudentProcess(path, **limits) as student:
                check(make_pool(student, POOL_BLOCKS, _TABLE_SIZE))

        return run

    yield "every block taken, and one more", with_pool(_takes_all)
    yield "a block that two tables hold", with_pool(_shares)
    yield "a block that is free is released", with_pool(_releases_twice)
    yield f"{POOL_CALLS} drawn calls", with_pool(_drawn)
    yield "three tables that write to one block", with_pool(_writes)


def _takes_all(pool: StudentPool) -> None:
    _expect_free(pool, POOL_BLOCKS)
    taken = [_taken(pool, set(), POOL_BLOCKS - i) for i in range(POOL_BLOCKS)]
    if len(set(taken)) < POOL_BLOCKS:
        raise Broken("I2", "repeats", f"{pool.take_name}() has given a block to two tables")
    if pool.take() is not None:
        said = f"{pool.take_name}() gives a block when all {POOL_BLOCKS} are in use; it must return None"
        raise Broken("I2", "invents", said)
    for left, block in enumerate(taken, start=1):
        pool.release(block)
        _expect_free(pool, left)


def _shares(pool: StudentPool) -> None:
    if not pool.share_name:
        return
    block = _taken(pool, set(), POOL_BLOCKS)
    pool.share(block)
    pool.release(block)
    if pool.num_free() != POOL_BLOCKS - 1:
        raise Broken("I1", "forgets", f"block {block} has one reference left, and {pool.num_free()} blocks are free")
    rest = [pool.take() for _ in range(POOL_BLOCKS - 1)]
    if block in rest:
        raise Broken("I1", "forgets", f"block {block} has one reference left, and {pool.take_name}() gives it away")
    pool.release(block)
    _expect_free(pool, 1)


def _releases_twice(pool: StudentPool) -> None:
    block = _taken(pool, set(), POOL_BLOCKS)
    pool.release(block)
    try:
        pool.release(block)
    except StudentError as error:
        if " raised " not in str(error):
            raise
        return
    raise Broken("I1", "released twice", f"{pool.release_name}({block}) of a block that is free raises nothing")


def _drawn(pool: StudentPool) -> None:
    drawn, refs = random.Random(3), dict[int, int]()
    for _ in range(POOL_CALLS):
        match drawn.choice(("take", "take", "share", "release", "release")):
            case "take" if len(refs) < POOL_BLOCKS:
                refs[_taken(pool, set(refs), POOL_BLOCKS - len(refs))] = 1
            case "share" if refs and pool.share_name:
                block = drawn.choice(sorted(refs))
                pool.share(block)
                refs[block] += 1
            case "release" if refs:
                block = drawn.choice(sorted(refs))
                pool.release(block)
                refs[block] -= 1
                if not refs[block]:
                    del refs[block]
        _expect_free(pool, POOL_BLOCKS - len(refs))


def _taken(pool: StudentPool, held: set[int], free: int) -> int:
    block = pool.take()
    if block is None:
        raise Broken("I15", "leak", f"{pool.take_name}() returns None, and {free} blocks have no reference")
    if not 0 <= block < POOL_BLOCKS:
        raise Broken("I2", "range", f"{pool.take_name}() gives block {block} of {POOL_BLOCKS}")
    if block in held:
        raise Broken("I2", "repeats", f"{pool.take_name}() gives block {block}, which a table has")
    return block


def _writes(pool: StudentPool) -> None:
    """A block of three tables: each writer but the last gets a copy of its own, and every copy is counted."""
    if not (pool.share_name and pool.copy_name):
        return
    block = _taken(pool, set(), POOL_BLOCKS)
    pool.share(block)
    pool.share(block)
    held, before = {block}, pool.num_copies()
    for left in (2, 1):
        new = pool.copy_on_write(block)
        if new in held:
            said = f"{pool.copy_name}({block}) gives block {new}, and another table has it"
            raise Broken("I3", "writes shared", said)
        held.add(new)
        _expect_free(pool, POOL_BLOCKS - len(held))
        _expect_copies(pool, before, 3 - left)
    if (new := pool.copy_on_write(block)) != block:
        said = f"{pool.copy_name}({block}) gives block {new} to the only table that has {block}; it may write in place"
        raise Broken("I3", "copies own", said)
    _expect_copies(pool, before, 2)
    for each in sorted(held):
        pool.release(each)
    _expect_free(pool, POOL_BLOCKS)


def _expect_copies(pool: StudentPool, before: int | None, expected: int) -> None:
    found = pool.num_copies()
    if found is not None and before is not None and found - before != expected:
        raise Broken("I3", "copies", f"the pool counts {found - before} copies on write, and there were {expected}")


def _table_checks(path: Path, limits: dict[str, float]) -> Iterator[tuple[str, Check]]:
    def run() -> None:
        with StudentProcess(path, **limits) as student:
            _places(student)

    yield f"a table of blocks {', '.join(map(str, _TABLE_BLOCKS))}, {_TABLE_SIZE} tokens each", run


def _places(student: StudentProcess) -> None:
    """The entry or the block of each position, alone or with the offset; the same form for all."""
    table = make_table(student, _TABLE_SIZE, _TABLE_BLOCKS)
    forms = {"entry", "block", "entry and offset", "block and offset"}
    for position in _POSITIONS:
        found = table.position_to_block(position)
        index, offset = divmod(position, _TABLE_SIZE)
        right: dict[str, object] = {"entry": index, "entry and offset": [index, offset]}
        if table.blocks:
            right |= {"block": table.blocks[index], "block and offset": [table.blocks[index], offset]}
        forms &= {form for form, value in right.items() if value == found}
        if not forms:
            said = f"position_to_block({position}) gives {found!r:.60}; it is in entry {index}, at offset {offset}"
            raise Broken("I4", "position", said)


_CHECKS: dict[str, Callable[[Path, dict[str, float]], Iterator[tuple[str, Check]]]] = {
    "BlockPool": _pool_checks,
    "PageTable": _table_checks,
    "Scheduler": _scheduler_checks,
}


def _expect_free(pool: StudentPool, expected: int) -> None:
    found = pool.num_free()
    if found != expected:
        raise Broken("I2", "num_free", f"num_free is {found}, and {expected} blocks have no reference")
