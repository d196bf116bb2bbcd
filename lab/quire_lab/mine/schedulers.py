"""Schedulers behind the student's protocol: the student's, a plain one over a student's pool, static batches, ours.

Promises: all of them are driven by the same referee, with the same requests. Must not know: models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from quire_lab.mine.process import Student
from quire_lab.mine.referee import Machine, Plan, Slice, plan_of
from quire_lab.mine.students import free_blocks
from quire_lab.simulation.stepwise import Stepwise


class Pool(Protocol):
    """A block pool as `docs/learn.md` describes it."""

    def take(self) -> int | None:
        """A free block, with one reference from now on; None: there is none."""
        ...

    def release(self, block: int) -> None:
        """One reference less; without any the block is free."""
        ...

    def num_free(self) -> int:
        """Blocks without a reference."""
        ...


class StudentScheduler:
    """A student's scheduler, in its own process."""

    def __init__(self, student: Student) -> None:
        self._student = student

    def add(self, request_id: str, num_prompt_tokens: int, max_new_tokens: int) -> None:
        self._student.call("add", request_id, num_prompt_tokens, max_new_tokens)

    def schedule(self) -> Plan:
        return plan_of(self._student.call("schedule"))

    def ended(self, request_id: str) -> None:
        self._student.call("ended", request_id)

    def num_free(self) -> int:
        return free_blocks(self._student.read("num_free"))


class ListPool:
    """The plainest pool: a list of free blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def release(self, block: int) -> None:
        self._free.append(block)

    def num_free(self) -> int:
        return len(self._free)


@dataclass(slots=True)
class _Known:
    """The facts that a scheduler knows of a request."""

    num_prompt: int
    max_new_tokens: int
    known: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class PlainScheduler:
    """First come, first served, in chunks; when blocks run out the youngest gives its own up. For a student's pool."""

    def __init__(self, machine: Machine, pool: Pool) -> None:
        self._machine, self._pool = machine, pool
        self._requests: dict[str, _Known] = {}  # in the order of arrival

    def add(self, request_id: str, num_prompt_tokens: int, max_new_tokens: int) -> None:
        self._requests[request_id] = _Known(num_prompt_tokens, max_new_tokens, num_prompt_tokens)

    def ended(self, request_id: str) -> None:
        self._give_up(self._requests.pop(request_id))

    def num_free(self) -> int:
        return self._pool.num_free()

    def schedule(self) -> Plan:
        budget, slices, preempted = self._machine.max_num_batched_tokens, dict[str, int](), list[str]()
        by_turn = sorted(self._requests.items(), key=lambda item: item[1].known - item[1].computed != 1)
        for name, one in [
            *(each for each in by_turn if each[1].computed),
            *(each for each in by_turn if not each[1].computed),
        ]:
            if name in preempted or budget < 1 or len(self._running() | {name}) > self._machine.max_num_seqs:
                continue
            if preempted and not one.computed:
                continue
            count = min(budget, one.known - one.computed)
            if self._reserve(name, one, one.computed + count, slices, preempted):
                slices[name], budget = count, budget - count
        made = [
            Slice(request_id=name, num_tokens=n, blocks=tuple(self._requests[name].blocks))
            for name, n in slices.items()
        ]
        for name, count in slices.items():
            one = self._requests[name]
            one.computed += count
            one.known += one.computed == one.known
        return Plan(slices=tuple(made), preempted=tuple(preempted))

    def _running(self) -> set[str]:
        return {name for name, one in self._requests.items() if one.blocks}

    def _reserve(self, name: str, one: _Known, end: int, slices: dict[str, int], preempted: list[str]) -> bool:
        """Blocks for `end` tokens; a request that runs takes those of the youngest, one that enters takes none."""
        while len(one.blocks) * self._machine.block_size < end:
            block = self._pool.take()
            if block is not None:
                one.blocks.append(block)
                continue
            others = [each for each in self._requests if each in self._running() and each not in slices]
            victim = others[-1] if others else name
            if not one.computed or victim == name:
                self._give_up(one)
                if one.computed:
                    one.computed = 0
                    preempted.append(name)
                return False
            self._give_up(self._requests[victim])
            self._requests[victim].computed = 0
            preempted.append(victim)
        return True

    def _give_up(self, one: _Known) -> None:
        for block in reversed(one.blocks):
            self._pool.release(block)
        one.blocks = []


class StaticScheduler:
    """Static batching: every member of a batch reserves its whole length, and none joins before all have ended."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._pool = machine, ListPool(machine.num_blocks)
        self._waiting: dict[str, _Known] = {}
        self._batch: dict[str, _Known] = {}

    def add(self, request_id: str, num_prompt_tokens: int, max_new_tokens: int) -> None:
        self._waiting[request_id] = _Known(num_prompt_tokens, max_new_tokens, num_prompt_tokens)

    def ended(self, request_id: str) -> None:
        for block in self._batch.pop(request_id).blocks:
            self._pool.release(block)

    def num_free(self) -> int:
        return self._pool.num_free()

    def schedule(self) -> Plan:
        if not self._batch:
            self._fill()
        slices, budget = list[Slice](), self._machine.max_num_batched_tokens
        in_order = sorted(self._batch.items(), key=lambda item: item[1].known - item[1].computed != 1)
        for name, one in in_order:
            count = min(budget, one.known - one.computed)
            if count:
                slices.append(Slice(request_id=name, num_tokens=count, blocks=tuple(one.blocks)))
                budget -= count
                one.computed += count
                one.known += one.computed == one.known
        return Plan(slices=tuple(slices))

    def _fill(self) -> None:
        for name, one in list(self._waiting.items()):
            needed = -(-(one.num_prompt + one.max_new_tokens - 1) // self._machine.block_size)
            if len(self._batch) == self._machine.max_num_seqs or needed > self._pool.num_free():
                return
            one.blocks = [block for _ in range(needed) if (block := self._pool.take()) is not None]
            self._batch[name] = self._waiting.pop(name)


class OurScheduler:
    """The scheduler of the server."""

    def __init__(self, machine: Machine) -> None:
        self._scheduler = Stepwise(
            num_blocks=machine.num_blocks,
            block_size=machine.block_size,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
        )

    def add(self, request_id: str, num_prompt_tokens: int, max_new_tokens: int) -> None:
        self._scheduler.add(request_id, num_prompt_tokens, max_new_tokens)

    def schedule(self) -> Plan:
        planned = self._scheduler.plan()
        slices = [Slice(request_id=name, num_tokens=count, blocks=blocks) for name, count, blocks in planned.slices]
        return Plan(slices=tuple(slices), preempted=planned.preempted)

    def ended(self, request_id: str) -> None:
        """Do nothing: the scheduler knows by itself."""

    def num_free(self) -> int:
        return self._scheduler.num_free
