"""Contiguous allocation, as before paging: a request reserves one run of token slots for the longest it may become.

Requests still join and leave between steps, so the difference from a paged server is the memory alone: what is reserved
and empty, and holes between reservations that are each too short. Promises: the same load, cost model, slots and budget
as for the compared scheduler, first come, first served, the first hole that fits. Must not know: the scheduler.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_bench.traces import TraceRow
from quire_engine.cost_model import StepSizes
from quire_lab.simulation.outcome import Outcome, Served
from quire_lab.simulation.setup import Setup

_FULL, _RESERVED, _HOLE = "█", "░", "·"


@dataclass(slots=True, order=True)
class Run:
    """A request's reservation: slots `start` .. `start + length - 1`, of which the first `used` have tokens."""

    start: int
    length: int
    used: int = field(default=0, compare=False)
    served: Served | None = field(default=None, compare=False)

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The memory in one step: each reservation's start, length and used slots, in order."""

    num_slots: int
    step: int
    runs: tuple[tuple[int, int, int], ...]

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Start and length of each run of slots that is not reserved."""
        found, at = [], 0
        for start, length, _ in (*self.runs, (self.num_slots, 0, 0)):
            if start > at:
                found.append((at, start - at))
            at = start + length
        return found


@dataclass(slots=True, kw_only=True)
class ContiguousOutcome:
    """A run with contiguous memory."""

    outcome: Outcome
    num_slots: int
    steps_at_holes: int = 0  # in which the first in the queue fitted into the free slots together and into no hole
    steps_short: int = 0  # in which it did not fit into the free slots together either
    slot_steps: int = 0  # reserved slots, summed over steps
    token_steps: int = 0  # of them, those with a token
    worst: Picture | None = None  # the step in which most free slots were of no use to who waited

    @property
    def efficiency(self) -> float:
        """Slots with a token over reserved ones."""
        return self.token_steps / max(1, self.slot_steps)


def simulate_contiguous(setup: Setup, rows: Sequence[TraceRow], *, speed: float = 1.0) -> ContiguousOutcome:
    """Serve a load. A request that is longer than the memory is refused."""
    return _Contiguous(setup).run(rows, speed)


class _Contiguous:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        config = setup.scheduler
        self._made = ContiguousOutcome(
            outcome=Outcome(num_blocks=config.num_blocks), num_slots=config.num_blocks * config.limits.block_size
        )
        self._runs: list[Run] = []  # in the order of their slots
        self._queue: deque[Run] = deque()
        self._now = 0.0
        self._most_lost = 0

    def run(self, rows: Sequence[TraceRow], speed: float) -> ContiguousOutcome:
        coming = deque(Served(row=row, number=number, at=row.at / speed) for number, row in enumerate(rows))
        while coming or self._queue or self._runs:
            if not self._queue and not self._runs:
                self._now = max(self._now, coming[0].at)
            while coming and coming[0].at <= self._now:
                self._arrive(coming.popleft())
            self._enter()
            if self._runs:
                self._step()
        self._made.outcome.seconds = self._now
        return self._made

    def _arrive(self, served: Served) -> None:
        self._made.outcome.requests.append(served)
        length = served.row.input_tokens + max(served.row.output_tokens, served.row.max_tokens or 0) - 1
        if length > self._made.num_slots:
            served.refused, served.why = "infeasible", f"{length} slots are needed, {self._made.num_slots} are there"
        else:
            self._queue.append(Run(0, length, served=served))

    def _enter(self) -> None:
        """Let requests in, in the order of arrival, each into the first hole that fits."""
        while self._queue and len(self._runs) < self._setup.scheduler.limits.max_num_seqs:
            first, at = self._queue[0], 0
            for run in self._runs:
                if run.start - at >= first.length:
                    break
                at = run.end
            if self._made.num_slots - at < first.length:
                self._note_lost(first)
                return
            first.start = at
            if first.served is not None:
                first.served.queue_seconds = self._now - first.served.at
            insort(self._runs, self._queue.popleft())

    def _note_lost(self, first: Run) -> None:
        """The first in the queue fits into no hole: what is free is of no use to it."""
        free = self._made.num_slots - sum(run.length for run in self._runs)
        if free >= first.length:
            self._made.steps_at_holes += 1
        else:
            self._made.steps_short += 1
        if free > self._most_lost:
            self._most_lost = free
            runs = tuple([(run.start, run.length, run.used) for run in self._runs])
            self._made.worst = Picture(num_slots=self._made.num_slots, step=self._made.outcome.steps, runs=runs)

    def _step(self) -> None:
        """Every decode gets its token; what is left of the budget goes to prompts, in the order of arrival."""
        outcome, limits = self._made.outcome, self._setup.scheduler.limits
        decodes = [run for run in self._runs if run.served is not None and run.used >= run.served.row.input_tokens]
        prompts = [run for run in self._runs if run.served is not None and run.used < run.served.row.input_tokens]
        prompts.sort(key=lambda run: run.served.number if run.served is not None else 0)
        context, before, left = sum(run.used + 1 for run in decodes), 0, limits.max_num_batched_tokens - len(decodes)
        chunks: list[tuple[Run, int]] = []
        for run in prompts:
            size = min(left, limits.prefill_chunk, (run.served.row.input_tokens if run.served else 0) - run.used)
            if size > 0:
                chunks.append((run, size))
                before += size * run.used
                left -= size
        total = len(decodes) + sum(size for _, size in chunks)
        sizes = StepSizes(total, len(decodes), context, before)
        seconds = self._setup.cost.seconds_of(sizes)
        self._now += seconds
        outcome.steps += 1
        outcome.busy_seconds += seconds
        outcome.computed_tokens += total
        outcome.decode_tokens += len(decodes)
        for run, size in (*((run, 1) for run in decodes), *chunks):
            run.used += size
            self._take(run)
        reserved = sum(run.length for run in self._runs)
        self._made.slot_steps += reserved
        self._made.token_steps += sum(min(run.used, run.length) for run in self._runs)
        blocks = -(-reserved // limits.block_size)
        outcome.block_steps += blocks
        if blocks > outcome.peak_blocks:
            outcome.peak_blocks, outcome.peak_step = blocks, outcome.steps - 1
        self._runs = [run for run in self._runs if run.served is not None and run.served.num_left]

    def _take(self, run: Run) -> None:
        """The next token of a request whose known ones are computed."""
        served = run.served
        if served is None or run.used < served.row.input_tokens:
            return
        if served.num_tokens:
            self._made.outcome.gaps.append(self._now - served.last_at)
        else:
            served.first_at = self._now
        served.last_at = self._now
        served.num_tokens += 1
        if not served.num_left:
            served.ended_step = self._made.outcome.steps


def drawn(picture: Picture, *, width: int = 72, rows: int = 4) -> list[str]:
    """The memory as lines of text: slots with tokens, reserved and empty ones, and holes; each cell is mostly one."""
    cells = width * rows
    per_cell = max(1, -(-picture.num_slots // cells))
    kinds: list[list[int]] = [[0, 0, 0] for _ in range(-(-picture.num_slots // per_cell))]

    def add(kind: int, start: int, length: int) -> None:
        at = start
        while at < start + length:
            cell = at // per_cell
            end = min(start + length, (cell + 1) * per_cell)
            kinds[cell][kind] += end - at
            at = end

    for start, length, used in picture.runs:
        add(0, start, min(used, length))
        add(1, start + min(used, length), length - min(used, length))
    for start, length in picture.holes:
        add(2, start, length)
    text = "".join((_FULL, _RESERVED, _HOLE)[max(range(3), key=counts.__getitem__)] for counts in kinds)
    return [text[at : at + width] for at in range(0, len(text), width)]


LEGEND = f"{_FULL} a token  {_RESERVED} reserved, empty  {_HOLE} a hole"
