"""The running groups, of which those that do nothing but decode are rows of arrays: a step is a few operations for all.

A decode has a row from its first output on, if it is plain and not the elder's. Then its counts and its newest tokens
stand in the arrays and nowhere else: its `Sequence` reads them through its `Row`. Before anything but a decode happens
to it, it leaves. Plans, results, statistics and logs are those that it would have had by itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from quire_engine.contract.batch import PENDING, Batch, SampledToken, ScheduledSequence, StepResult
from quire_engine.contract.decodes import BatchInColumns, Column, DecodeRow, Decodes
from quire_engine.contract.invariants import require
from quire_engine.contract.token_columns import Stream
from quire_engine.scheduling.account import Account
from quire_engine.scheduling.blocks import Row
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.sequence import MOST_STOP_IDS, Group, Sequence
from quire_engine.scheduling.step_plan import StepPlan

FEWEST = 16  # running requests: with fewer the fixed costs of rows are more than they save
_NONE = -2  # in place of a stop id; no token has it, nor is it PENDING

FreeBlocks = Callable[[Group, int, StepPlan], bool]  # preempts for so many blocks; False: the group itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The rows in the order of service, until a sequence comes or leaves."""

    places: Column  # [N]
    groups: tuple[Group, ...]  # [N]
    rows: tuple[DecodeRow, ...]  # [N]
    sequence_ids: Column  # [N]
    streams: tuple[Stream, ...]  # [N]
    accounts: Counter[Account]  # of the rows, those that have one
    behind: dict[Group, int]  # of every other running group: how many rows are served before it
    num_batch: int  # rows of batch groups
    draws: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step's results, of which the tokens of the rows that go on are taken."""

    streams: tuple[Stream, ...]  # the rows that go on
    ids: bytes  # of their tokens, as `Outputs` has them
    rest: Iterator[tuple[int, ScheduledSequence]]  # to be applied by itself, and how many of the streams come before


class RunningDecodes:
    """Owns the rows. A step calls `serve`, `planned`, `advance`, `take`; who changes a group calls `leave` first."""

    def __init__(self, kv: KVAllocator, *, max_num_seqs: int, max_model_len: int, fewest: int | None = FEWEST) -> None:
        """`fewest`: requests that must run before one comes in; None: none ever does."""
        size = kv.block_size
        self.running: list[Group] = []  # all running groups in the order of service; `Roster` keeps it
        is_used = fewest is not None and len(kv.groups) == 1 and not kv.by_window
        self._fewest = self._fewest_if_open = fewest if is_used and fewest is not None else sys.maxsize
        capacity = max_num_seqs if is_used else 0
        self._kv, self._size = kv, size
        numbers = np.zeros((6, capacity), dtype=np.int64)
        self._positions, self._certain, self._ends, self._slots, self._tokens, self._tenures = numbers
        self._stops = np.full((capacity, MOST_STOP_IDS), _NONE, dtype=np.int64)
        # Tokens by position modulo the width: those since the last full block, and those of the steps in flight.
        self._recent = np.zeros((capacity, 2 * size + 4), dtype=np.int64)
        self._tables = np.zeros((capacity, -(-max_model_len // size)), dtype=np.int32)
        # By place.
        self._block_ids: dict[int, tuple[int, ...]] = {}
        self._groups: dict[int, Group] = {}
        self._rows: dict[int, DecodeRow] = {}
        self._streams: dict[int, Stream] = {}
        self._place_of: dict[Group, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._elder: Group | None = None
        self._laid_out: Layout | None = None  # None: a sequence has come or left
        self._laid_out_of: list[Group] = []  # the running groups that the layout is of

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._place_of)

    def __contains__(self, group: object) -> bool:
        """Tell whether the group's sequence has a row."""
        return group in self._place_of

    # ---- coming and leaving ---------------------------------------------------------------------------------------

    def welcome(self, sequence: Sequence) -> None:
        """Give a row to a sequence without one, if nothing but decodes is ahead of it.

        Its newest token is applied. Nobody waits for its prompt, and none of its tokens is computed once more.
        """
        group, kv = sequence.group, sequence.kv
        if (
            len(self.running) >= self._fewest
            and group.is_plain
            and group is not self._elder
            and sequence in group.computing
            and sequence.has_output
            and kv.num_certain >= max(kv.num_promised, group.num_computed_before)
        ):
            self._join(sequence)

    def leave(self, group: Group) -> int:
        """Give the group's sequence its own counts and tokens again; returns how many rows it had."""
        place = self._place_of.pop(group, None)
        if place is None:
            return 0
        group.leader.leave_row()
        self._tenures[place] += 1  # results of steps in flight are not for the next one in this place
        for of_place in (self._block_ids, self._groups, self._rows, self._streams):
            del of_place[place]
        self._free.append(place)
        self._laid_out = None
        return 1

    @contextmanager
    def apart(self, sequences: Iterable[Sequence]) -> Iterator[None]:
        """Let sequences have no rows while many steps are taken for each of them at once."""
        for sequence in sequences:
            self.leave(sequence.group)
        yield
        for sequence in sequences:
            self.welcome(sequence)

    def except_for(self, elder: Group | None) -> None:
        """Let the elder have no row from now on, until there is another one or none."""
        self._elder = elder
        if elder is not None:
            self.leave(elder)

    def open(self, is_open: bool) -> None:
        """Take in sequences from now on, or none until they are opened again; those that are here stay."""
        self._fewest = self._fewest_if_open if is_open else sys.maxsize

    # ---- a plan ---------------------------------------------------------------------------------------------------

    def serve(self, plan: StepPlan, free_blocks: FreeBlocks) -> Iterator[Group]:
        """Give each row its token of the step; yields all groups without a row, to be served in between, in order.

        Rows whose last block is full get one more when it is their turn, for which others may be preempted.
        """
        plan.serve_rows(len(self._place_of))
        layout = self._layout
        if not layout.groups:
            yield from layout.behind
            return
        full = np.flatnonzero(self._positions[layout.places] == self._slots[layout.places]).tolist()
        at = 0
        for group, behind in layout.behind.items():
            while at < len(full) and full[at] < behind:
                self._grow(layout.groups[full[at]], plan, free_blocks)
                at += 1
            yield group
        for row in full[at:]:
            self._grow(layout.groups[row], plan, free_blocks)

    @property
    def num_batch(self) -> int:
        """Rows of batch groups."""
        return self._layout.num_batch

    def every_slice(self, plan: StepPlan) -> dict[Sequence, int]:
        """The plan's slices, and one for each row, in the order of the batch."""
        slices: dict[Sequence, int] = {}
        first, groups = 0, self._layout.groups
        for (sequence, size), place in zip(plan.slices.items(), self._rows_before(plan), strict=True):
            slices |= dict.fromkeys([group.leader for group in groups[first:place]], 1)
            slices[sequence], first = size, place
        return slices | dict.fromkeys([group.leader for group in groups[first:]], 1)

    def planned(self, plan: StepPlan) -> tuple[Decodes, list[int]] | None:
        """The rows as a part of the plan's step, and for each slice how many of them come before; None: no rows."""
        if not self._place_of:
            return None
        layout = self._layout
        places = layout.places
        positions = self._positions[places]
        width = -(-int(self._slots[places].max()) // self._size)
        decodes = Decodes(
            rows=layout.rows,
            sequence_ids=layout.sequence_ids,
            token_ids=np.where(self._certain[places] == positions, self._tokens[places], PENDING),
            positions=positions,
            block_ids=tuple(map(self._block_ids.__getitem__, places.tolist())),
            tables=np.take(self._tables[:, :width], places, axis=0),
            draws=layout.draws,
            places=places,
            tenures=self._tenures[places],
        )
        return decodes, self._rows_before(plan)

    def advance(self, batch: Batch) -> None:
        """Count the rows of a batch that was just planned as in flight; those whose last token is with them leave."""
        if not isinstance(batch, BatchInColumns):
            return
        decodes = batch.decodes
        self._positions[decodes.places] += 1
        last = np.flatnonzero(decodes.positions + 2 == self._ends[decodes.places])
        for place in decodes.places[last].tolist():
            group = self._groups[place]
            self.leave(group)
            group.note_launched(group.leader)

    # ---- a result -------------------------------------------------------------------------------------------------

    def take(self, batch: Batch, result: StepResult) -> Taken | None:
        """Take and charge the tokens of the rows that are here yet and go on; None: the batch has no rows."""
        if not isinstance(batch, BatchInColumns):
            return None
        decodes = batch.decodes
        ids, places, ends = tokens_of_rows(decodes, result), decodes.places, decodes.positions + 1
        goes_on = (self._tenures[places] == decodes.tenures) & (ids >= 0)
        goes_on &= ~(ids[:, None] == self._stops[places]).any(axis=1)
        full = np.flatnonzero(goes_on & (ends % self._size == 0)).tolist()
        left = np.flatnonzero(~goes_on).tolist()
        layout = self._laid_out
        if left:
            places, ends, ids = places[goes_on], ends[goes_on], ids[goes_on]
        if left or layout is None or layout.rows is not decodes.rows:
            streams = tuple([self._streams[place] for place in places.tolist()])
            accounts = self._accounts(places)
        else:
            streams, accounts = layout.streams, layout.accounts
        self._certain[places] = ends
        self._tokens[places] = ids
        self._recent[places, ends % self._recent.shape[1]] = ids
        for account, num_rows in accounts.items():
            account.charge_outputs(num_rows)
        return Taken(streams=streams, ids=ids.astype(">u4").tobytes(), rest=self._rest(batch, result, left, full))

    def take_one(self, sequence: Sequence, item: ScheduledSequence, result: StepResult) -> bool:
        """Take and charge the token of a slice whose sequence has got its row since the step was planned.

        False: it has no row, or had, and leaves to end with this token.
        """
        if sequence.row is None:
            return False
        group, place = sequence.group, sequence.row.place
        sample, position = result.samples[item.sequence_id][0], item.end
        if sample.error is not None or sample.token_id in group.stop_token_ids:
            self.leave(group)
            return False
        self._certain[place], self._tokens[place] = position, sample.token_id
        self._recent[place, position % self._recent.shape[1]] = sample.token_id
        if position % self._size == 0:
            self._note_full(place)
        if group.account is not None:
            group.account.charge_output(1)
        return True

    # ---- sums and checks ------------------------------------------------------------------------------------------

    @property
    def num_unused_slots(self) -> int:
        """Token slots in the blocks of running sequences that hold no token."""
        others = sum(unused_slots(self._without_rows(), self._size))
        return others + int(self._unused_in_rows().sum()) if self._place_of else others

    def unused_slots(self) -> Column:
        """Return for each page table of running sequences its token slots that hold no token."""
        others = np.fromiter(unused_slots(self._without_rows(), self._size), dtype=np.int64)
        return np.concatenate([self._unused_in_rows(), others])

    def check(self, elder: Group | None) -> None:
        """Raise InvariantViolation unless every row is that of a running sequence and has its tables and blocks."""
        require(elder is self._elder, "another group than the elder may have no row")
        require(elder not in self, "the elder has a row")
        here = [group for group in self.running if group in self._place_of]
        require(len(here) == len(self._place_of), "a row is that of a group that does not run")
        require(len(self._free) + len(self._place_of) == len(self._ends), "a place is neither free nor taken")
        for group in here:
            place, (sequence,) = self._place_of[group], group.sequences
            kv, table, row = sequence.kv, sequence.kv.table, sequence.row
            name = f"row {place}, of request {group.request.request_id}"
            require(row is not None and row.place == place and group.is_plain, f"{name}: its sequence knows of none")
            require(self._block_ids[place] == table.block_ids, f"{name}: other blocks than its table's")
            known = self._tables[place, : len(table)].tolist()
            require(known == list(table.block_ids), f"{name}: the arrays have other blocks")
            require(int(self._slots[place]) == table.num_slots, f"{name}: other slots than its table's")
            require(self._certain[place] <= self._positions[place], f"{name}: results of steps that are not planned")
            tokens = sequence.token_ids
            require(tokens[kv.num_certain] == int(self._tokens[place]), f"{name}: another last token")
            require(group.num_prompt_tokens <= kv.num_certain and not group.num_uncharged, f"{name}: in its prompt")
            require(kv.copies_from is None and not kv.shares_tail, f"{name}: a block is to be copied")

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _join(self, sequence: Sequence) -> None:
        group, kv, place = sequence.group, sequence.kv, self._free.pop()
        require(kv.num_reserved == kv.num_computed == sequence.num_known - 1, "a row would not begin with a decode")
        self._positions[place], self._certain[place] = kv.num_computed, kv.num_certain
        self._ends[place] = sequence.num_prompt_tokens + group.max_new_tokens
        self._tokens[place] = sequence.token_ids[kv.num_certain]
        self._tenures[place] += 1
        self._stops[place] = _NONE
        self._stops[place, : len(group.stop_token_ids)] = list(group.stop_token_ids)
        request = group.request
        self._rows[place] = DecodeRow(
            sequence.sequence_id,
            sequence.choice,
            group.num_preemptions,
            request.prompt_token_ids,
            group.sampling,
            request.stop,
        )
        self._streams[place] = Stream(request.request_id, sequence.choice, group.num_cached_tokens)
        counts = {"computed": self._positions.data, "certain": self._certain.data, "recent": self._recent[place].data}
        sequence.take_row(Row(kv, place, **counts))
        self._place_of[group], self._groups[place] = place, group
        self._take_table(place, sequence)
        self._laid_out = None

    def _grow(self, group: Group, plan: StepPlan, free_blocks: FreeBlocks) -> None:
        """Take one more block for a row whose last one is full, unless it has been preempted or is now."""
        if group.state == "running" and (self._kv.num_available or free_blocks(group, 1, plan)):
            self._kv.reserve_block(group.leader)
            self._take_table(self._place_of[group], group.leader)

    def _note_full(self, place: int) -> None:
        """Commit a row's last block, which tokens with applied results fill."""
        sequence = self._groups[place].leader
        self._kv.commit_block(sequence, int(self._certain[place]))  # reads the tokens before they are overwritten
        self._take_table(place, sequence)

    def _take_table(self, place: int, sequence: Sequence) -> None:
        """Copy the blocks of a row, which have changed, to its place."""
        table = sequence.kv.table
        known, now = self._block_ids.get(place, ()), table.block_ids
        first = len(known) if now[: len(known)] == known else 0
        self._tables[place, first : len(now)] = now[first:]
        self._block_ids[place] = now
        self._slots[place] = table.num_slots

    def _rest(
        self, batch: BatchInColumns, result: StepResult, left: list[int], full: list[int]
    ) -> Iterator[tuple[int, ScheduledSequence]]:
        """Commit the blocks of rows that are full and yield what else the step has, all in the order of the batch."""
        decodes, num_left = batch.decodes, 0
        slices = [(row, 0, at) for at, row in enumerate(batch.behind)]  # before that row
        for row, is_row, at in sorted([*slices, *((row, 1, 0) for row in left), *((row, 1, 1) for row in full)]):
            if not is_row:
                yield row - num_left, batch.others[at]
            elif at:
                self._note_full(int(decodes.places[row]))
            else:
                item = decodes.item(row)
                if result.decoded is not None and result.decoded[row] >= 0:
                    result.samples[item.sequence_id] = (SampledToken(token_id=int(result.decoded[row])),)
                yield row - num_left, item
                num_left += 1

    @property
    def _layout(self) -> Layout:
        if self._laid_out is None:
            self._laid_out, self._laid_out_of = self._arranged(), list(self.running)
        elif self._laid_out_of != self.running:  # others have come or left
            self._laid_out = replace(self._laid_out, behind=self._behind())
            self._laid_out_of = list(self.running)
        return self._laid_out

    def _arranged(self) -> Layout:
        groups = [group for group in self.running if group in self._place_of]
        places = [self._place_of[group] for group in groups]
        column = np.array(places, dtype=np.int64)
        rows = tuple([self._rows[place] for place in places])
        return Layout(
            places=column,
            groups=tuple(groups),
            rows=rows,
            sequence_ids=np.array([row.sequence_id for row in rows], dtype=np.int64),
            streams=tuple([self._streams[place] for place in places]),
            accounts=self._accounts(column),
            behind=self._behind(),
            num_batch=sum(group.is_batch for group in groups),
            draws=any(group.sampling.temperature != 0.0 for group in groups),
        )

    def _behind(self) -> dict[Group, int]:
        """Return how many rows are served before each running group without a row."""
        behind: dict[Group, int] = {}
        num_rows = 0
        for group in self.running:
            if group in self._place_of:
                num_rows += 1
            else:
                behind[group] = num_rows
        return behind

    def _rows_before(self, plan: StepPlan) -> list[int]:
        """Return for each slice of the plan, in order, how many rows are served before it."""
        layout, served = self._layout, set(plan.decodes)
        return [
            (0 if sequence.group is plan.elder else layout.behind[sequence.group])
            if sequence in served
            else len(layout.groups)
            for sequence in plan.slices
        ]

    def _without_rows(self) -> list[Sequence]:
        return [sequence for group in self._layout.behind for sequence in group.sequences]

    def _unused_in_rows(self) -> Column:
        places = self._layout.places
        return self._slots[places] - self._positions[places]

    def _accounts(self, places: Column) -> Counter[Account]:
        """How many of the rows each account has."""
        groups = self._groups
        return Counter([a for place in places.tolist() if (a := groups[place].account) is not None])


def tokens_of_rows(decodes: Decodes, result: StepResult) -> Column:
    """The token of each row, negative where there is none, or not one alone: [N]."""
    if result.decoded is not None:
        return np.asarray(result.decoded, dtype=np.int64)
    failed = result.errors.keys() | result.starved
    samples = [() if (i := row.sequence_id) in failed else result.samples.get(i, ()) for row in decodes.rows]
    return np.array([each[0].token_id if len(each) == 1 else -1 for each in samples], dtype=np.int64)


def unused_slots(sequences: Iterable[Sequence], block_size: int) -> Iterator[int]:
    """Token slots without a token in the blocks of each page table of the sequences; a shared block counts once."""
    shared = set[int]()
    for sequence in sequences:
        for table in sequence.kv.tables:
            spare = table.num_slots - sequence.kv.num_computed
            if sequence.kv.shares_tail and spare:
                tail = table.block_ids[sequence.kv.num_computed // block_size]
                if tail in shared:
                    spare -= block_size - sequence.kv.num_computed % block_size
                shared.add(tail)
            yield spare
