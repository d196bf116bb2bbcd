"""Holds a scheduler's plans against the invariants that ours is held against, and counts what they are worth.

Promises: the truth about every request is kept here, whoever plans; the first plan that breaks an invariant ends the
run and is named by it. The invariants are those of `quire_engine.scheduling.scheduler.Scheduler.check_invariants`, by
their numbers. Must not know: processes, models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a scheduler plans for."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a load; `step`: of the run, from 1, before which it is added."""

    request_id: str
    num_prompt: int
    max_new_tokens: int
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Tokens of one request to compute in a step, from where it is, and its whole page table."""

    request_id: str
    num_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step: what is computed, and whose blocks were taken away before."""

    slices: tuple[Slice, ...]
    preempted: tuple[str, ...] = ()


class SchedulerUnderTest(Protocol):
    """A scheduler as `docs/learn.md` describes it, whoever wrote it."""

    def add(self, request_id: str, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """A request arrives."""
        ...

    def schedule(self) -> Plan:
        """The next step."""
        ...

    def ended(self, request_id: str) -> None:
        """The request has all its tokens: its blocks are free."""
        ...

    def num_free(self) -> int:
        """Blocks that no request holds."""
        ...


class Broken(Exception):
    """A plan that breaks an invariant: its number, the fault's short name, and what was found."""

    def __init__(self, invariant: str, fault: str, said: str) -> None:
        super().__init__(f"{invariant} {fault}: {said}")
        self.invariant, self.fault, self.said = invariant, fault, said


@dataclass(slots=True, kw_only=True)
class Request:
    """A request as it really is."""

    arrival: Arrival
    known: int  # tokens of the prompt and the output so far
    bound: int  # the step by which it must have ended
    computed: int = 0
    blocks: tuple[int, ...] = ()
    most_computed: int = 0
    first_step: int = 0  # with its first output token
    last_step: int = 0

    @property
    def outputs(self) -> int:
        return self.known - self.arrival.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes one output token."""
        return self.outputs > 0 and self.computed == self.known - 1

    @property
    def is_running(self) -> bool:
        return self.computed > 0


@dataclass(slots=True)
class Counts:
    """The worth of a run, in counts. Seats are places for sequences: `max_num_seqs` in each step."""

    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    peak_blocks: int = 0
    used_seats: int = 0
    empty_seats: dict[str, int] = field(default_factory=dict)  # by cause
    first_steps: list[int] = field(default_factory=list)  # from each request's arrival to its first token


NOBODY, BUDGET, BLOCKS, COULD = (
    "nobody waited",
    "the step's tokens were used up",
    "too few free blocks for who waited",
    "somebody waited who could have run",
)
CAUSES = (NOBODY, BUDGET, BLOCKS, COULD)
_PATIENCE, _SLACK = 4, 64  # of the bound on a request's steps: times the work before it, and steps beside
Watch = Callable[[Plan, Mapping[str, Request]], None]


class Referee:
    """One run of one load by one scheduler."""

    def __init__(self, machine: Machine, load: Iterable[Arrival], *, watch: Watch | None = None) -> None:
        """`watch` gets each valid plan with the requests before it is applied."""
        self._machine = machine
        self._coming = sorted(load, key=lambda arrival: arrival.step)
        self._watch = watch
        self.live: dict[str, Request] = {}
        self.counts = Counts()
        self.plans: list[Plan] = []

    def run(self, scheduler: SchedulerUnderTest) -> Counts:
        """Drive the load to its end. Raises Broken for the first plan that breaks an invariant."""
        step, coming = 0, list(self._coming)
        if scheduler.num_free() != self._machine.num_blocks:
            raise Broken("I15", "num_free", f"{scheduler.num_free()} blocks are free before the first request")
        while self.live or coming:
            step += 1
            if not self.live:
                step = max(step, coming[0].step)
            while coming and coming[0].step <= step:
                self._add(coming.pop(0), step, scheduler)
            self._step(step, scheduler)
        free = scheduler.num_free()
        if free != self._machine.num_blocks:
            raise Broken("I15", "leak", f"no request is left, and {free} of {self._machine.num_blocks} blocks are free")
        return self.counts

    def _add(self, arrival: Arrival, step: int, scheduler: SchedulerUnderTest) -> None:
        before = sum(self._work(one.arrival) for one in self.live.values())
        bound = step + _PATIENCE * (self._work(arrival) + before) + _SLACK
        self.live[arrival.request_id] = Request(arrival=arrival, known=arrival.num_prompt, bound=bound)
        scheduler.add(arrival.request_id, arrival.num_prompt, arrival.max_new_tokens)

    def _work(self, arrival: Arrival) -> int:
        """Steps that a request takes alone."""
        return -(-arrival.num_prompt // self._machine.max_num_batched_tokens) + arrival.max_new_tokens

    def _step(self, step: int, scheduler: SchedulerUnderTest) -> None:
        for request in self.live.values():
            if step > request.bound:
                name, age = request.arrival.request_id, step - request.arrival.step
                raise Broken("I17", "starves", f"{name} is unfinished after {age} steps; others came later and ended")
        plan = scheduler.schedule()
        self.plans.append(plan)
        self._preempt(plan)
        self._check(plan)
        if self._watch is not None:
            self._watch(plan, self.live)
        self._count(plan)
        for ended in self._apply(plan, step):
            scheduler.ended(ended)

    def _preempt(self, plan: Plan) -> None:
        computed = {each.request_id for each in plan.slices}
        for name in plan.preempted:
            request = self.live.get(name)
            if request is None or not request.is_running:
                raise Broken("I19", "preempts", f"{name} is preempted and does not run")
            if name in computed:
                raise Broken("I6", "preempts", f"{name} is preempted and computed in one step")
            request.computed, request.blocks = 0, ()
            self.counts.preemptions += 1

    def _check(self, plan: Plan) -> None:
        machine, seen = self._machine, set[str]()
        for each in plan.slices:
            if each.request_id not in self.live:
                raise Broken("I19", "unknown", f"{each.request_id} is computed: it has ended, or was never added")
            if each.request_id in seen:
                raise Broken("I4", "twice", f"{each.request_id} has two slices in one step")
            seen.add(each.request_id)
            self._check_slice(each, self.live[each.request_id])
        total = sum(each.num_tokens for each in plan.slices)
        if total > machine.max_num_batched_tokens:
            raise Broken("I5", "budget", f"a step computes {total} tokens of at most {machine.max_num_batched_tokens}")
        running = seen | {name for name, one in self.live.items() if one.is_running}
        if len(running) > machine.max_num_seqs:
            raise Broken("I5", "seats", f"{len(running)} sequences run, of at most {machine.max_num_seqs}")
        self._check_blocks(plan)
        for name, request in self.live.items():
            if request.is_decoding and name not in seen:
                raise Broken("I6", "stall", f"{name} decodes, and gets neither its next token nor a preemption")
        if not plan.slices:
            raise Broken("I8", "idle", f"a step computes nothing while {len(self.live)} requests are unfinished")

    def _check_slice(self, each: Slice, request: Request) -> None:
        name, size = each.request_id, self._machine.block_size
        end = request.computed + each.num_tokens
        if each.num_tokens < 1 or end > request.known:
            raise Broken(
                "I4",
                "tokens",
                f"{name} computes {each.num_tokens} tokens, and {request.known - request.computed} are left",
            )
        if len(each.blocks) * size < end:
            raise Broken("I4", "short", f"{name} has {len(each.blocks)} blocks of {size} for {end} tokens")
        if len(set(each.blocks)) < len(each.blocks):
            raise Broken("I3", "repeats", f"a block is twice in the table of {name}")
        for block in each.blocks:
            if not 0 <= block < self._machine.num_blocks:
                raise Broken("I2", "range", f"{name} has block {block}, and there are {self._machine.num_blocks}")
        written = -(-request.computed // size)
        if each.blocks[:written] != request.blocks[:written]:
            raise Broken(
                "I12",
                "moves",
                f"the first {request.computed} tokens of {name} are in other blocks, which nobody has filled",
            )

    def _check_blocks(self, plan: Plan) -> None:
        """A block is in one table alone: who writes to it would overwrite another's tokens."""
        tables = {name: one.blocks for name, one in self.live.items() if one.is_running}
        tables |= {each.request_id: each.blocks for each in plan.slices}
        owner: dict[int, str] = {}
        for name, blocks in tables.items():
            for block in blocks:
                if block in owner:
                    raise Broken("I3", "shares", f"block {block} is in the tables of {owner[block]} and {name}")
                owner[block] = name
        self.counts.peak_blocks = max(self.counts.peak_blocks, len(owner))

    def _count(self, plan: Plan) -> None:
        """Say of each seat that is empty in this step why it is."""
        counts, machine = self.counts, self._machine
        running = {each.request_id for each in plan.slices} | {n for n, one in self.live.items() if one.is_running}
        held = sum(len(one.blocks) for name, one in self.live.items() if one.is_running)
        held += sum(len(each.blocks) - len(self.live[each.request_id].blocks) for each in plan.slices)
        free = machine.num_blocks - held
        left = machine.max_num_batched_tokens - sum(each.num_tokens for each in plan.slices)
        counts.steps += 1
        counts.used_seats += len(plan.slices)
        waiting = [one for name, one in self.live.items() if name not in running]
        for _ in range(machine.max_num_seqs - len(plan.slices)):
            cause = NOBODY
            if waiting:
                needed = [-(-one.known // machine.block_size) for one in waiting]
                fits = min(range(len(waiting)), key=needed.__getitem__)
                cause = BUDGET if left < 1 else BLOCKS if needed[fits] > free else COULD
                if cause == COULD:
                    free -= needed[fits]
                    left -= min(left, waiting.pop(fits).known)
            counts.empty_seats[cause] = counts.empty_seats.get(cause, 0) + 1

    def _apply(self, plan: Plan, step: int) -> list[str]:
        """Every slice is computed; a request whose last known token is computed gets its next one."""
        ended: list[str] = []
        for each in plan.slices:
            request = self.live[each.request_id]
            before, request.computed, request.blocks = request.computed, request.computed + each.num_tokens, each.blocks
            self.counts.computed_tokens += each.num_tokens
            self.counts.recomputed_tokens += max(0, min(request.most_computed, request.computed) - before)
            request.most_computed = max(request.most_computed, request.computed)
            if request.computed == request.known:
                request.known += 1
                request.first_step = request.first_step or step
                request.last_step = step
                if request.outputs == request.arrival.max_new_tokens:
                    ended.append(each.request_id)
                    self.counts.first_steps.append(request.first_step - request.arrival.step + 1)
        for name in ended:
            del self.live[name]
        return ended


def plan_of(answer: object) -> Plan:
    """A student's answer to `schedule()` as a plan. Raises Broken where it is none."""
    wrong = Broken(
        "I4", "shape", "schedule() must return (slices, preempted): slices of (request_id, num_tokens, blocks), and ids"
    )
    if not isinstance(answer, list | tuple) or len(answer) != 2:
        raise wrong
    slices, preempted = answer
    if not isinstance(slices, list | tuple) or not isinstance(preempted, list | tuple):
        raise wrong
    made: list[Slice] = []
    for each in slices:
        match each:
            case [str(name), int(count), [*blocks]] if all(type(block) is int for block in blocks):
                made.append(Slice(request_id=name, num_tokens=count, blocks=tuple(blocks)))
            case _:
                raise wrong
    if not all(isinstance(name, str) for name in preempted):
        raise wrong
    return Plan(slices=tuple(made), preempted=tuple(preempted))


def same_plans(one: Sequence[Plan], other: Sequence[Plan]) -> int | None:
    """The first step whose plans differ, from 1; None: all are equal."""
    for number, (first, second) in enumerate(zip(one, other, strict=False), start=1):
        if first != second:
            return number
    return None if len(one) == len(other) else min(len(one), len(other)) + 1
