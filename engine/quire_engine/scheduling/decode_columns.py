"""Running sequences that do nothing but decode, as rows of columns, so that a step's work on them is a few operations.

A sequence is here from its first output on, while it is plain and not the elder. Then its counts and its newest tokens
stand here and nowhere else: `Sequence` and `ColumnKV` read them through its place. Whatever else happens to it, it
leaves first. Plans, results, statistics and logs are those that it would have had outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass, replace

import numpy as np

from quire_engine.contract.batch import PENDING
from quire_engine.contract.decodes import Column, DecodeRow, Decodes
from quire_engine.contract.invariants import InvariantViolation, require
from quire_engine.contract.token_columns import Stream
from quire_engine.scheduling.account import Account
from quire_engine.scheduling.blocks import SequenceKV
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.sequence import MOST_STOP_IDS, Group, Sequence

FEWEST = 16  # running sequences: with fewer the fixed costs of columns are more than they save
_NONE = -2  # in place of a stop id; no token has it, nor is it PENDING


class ColumnKV(SequenceKV):
    """The counts of a sequence in the columns. There is no other record of them to be set."""

    __slots__ = ("_columns", "_place")

    def __init__(self, own: SequenceKV, columns: DecodeColumns, place: int) -> None:
        self._columns, self._place = columns, place
        self.tables, self.owner, self.block_hashes = own.tables, own.owner, own.block_hashes
        self.num_committed, self.num_promised = own.num_committed, own.num_promised
        self.num_lent, self.copies_from, self.shares_tail, self.swapped = 0, None, False, None

    @property
    def num_computed(self) -> int:  # type: ignore[override]
        return int(self._columns.positions[self._place])

    @property
    def num_reserved(self) -> int:  # type: ignore[override]
        return self.num_computed

    @property
    def num_certain(self) -> int:  # type: ignore[override]
        return int(self._columns.certain[self._place])

    @property
    def num_settled(self) -> int:  # type: ignore[override]
        return self.num_certain

    def alone(self, num_computed: int, num_certain: int) -> SequenceKV:
        """The counts of a sequence that has left the columns."""
        return SequenceKV(
            tables=self.tables,
            owner=self.owner,
            num_computed=num_computed,
            num_reserved=num_computed,
            block_hashes=self.block_hashes,
            num_committed=self.num_committed,
            num_certain=num_certain,
            num_promised=self.num_promised,
            num_settled=num_certain,
        )


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
    """The part of a step's results that the columns have taken: the tokens of the rows that go on."""

    streams: tuple[Stream, ...]
    ids: Column
    accounts: Counter[Account]
    left: Values[int]  # rows whose results are to be applied one by one, ascending
    full: Values[int]  # rows that go on and have filled a block, ascending


class DecodeColumns:
    """Owns the rows. Its callers tell who comes, and that a step is planned, in flight, applied."""

    def __init__(self, kv: KVAllocator, *, max_num_seqs: int, max_model_len: int, fewest: int | None = FEWEST) -> None:
        """`fewest`: sequences that must run before one comes in; None: none ever does."""
        size = kv.block_size
        self._fewest = fewest if len(kv.groups) == 1 and not kv.by_window else None
        self._fewest_if_open = self._fewest
        capacity = max_num_seqs if self._fewest is not None else 0
        self._kv, self._size = kv, size
        numbers = np.zeros((6, capacity), dtype=np.int64)
        self.positions, self.certain, self._ends, self._slots, self._tokens, self._tenures = numbers
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
        self._layout: Layout | None = None  # None: a sequence has come or left
        self._laid_out: list[Group] = []  # the running groups that the layout is of

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, group: object) -> bool:
        return group in self._place_of

    # ---- coming and leaving ---------------------------------------------------------------------------------------

    def welcome(self, sequence: Sequence, num_running: int) -> None:
        """Take in a sequence that is not the elder's, if nothing but decodes is ahead of it."""
        group, kv = sequence.group, sequence.kv
        if (
            self._fewest is not None
            and num_running >= self._fewest
            and group.is_plain
            and group.state == "running"
            and not sequence.is_launched
            and sequence.has_output
            and kv.num_reserved == kv.num_computed == sequence.num_known - 1
            and kv.num_certain >= max(kv.num_promised, group.num_prompt_tokens, group.num_computed_before)
            and not group.num_uncharged
            and not kv.shares_tail
            and kv.copies_from is None
        ):
            self._join(sequence)

    def open(self, is_open: bool) -> None:
        """Take in sequences from now on, or none until they are opened again; those that are here stay."""
        self._fewest = self._fewest_if_open if is_open else None

    def leave(self, sequence: Sequence) -> None:
        """The sequence has its own counts and tokens again."""
        kv, token_ids = sequence.kv, self.tokens_of(sequence)
        place = self._place_of.pop(sequence.group)
        if not isinstance(kv, ColumnKV):
            raise InvariantViolation("a sequence in the columns has counts of its own")
        sequence.leave_columns(token_ids, kv.alone(kv.num_computed, kv.num_certain))
        self._tenures[place] += 1  # results of steps in flight are not for the next one in this place
        for column in (self._block_ids, self._groups, self._rows, self._streams):
            del column[place]
        self._free.append(place)
        self._layout = None

    def num_known(self, group: Group) -> int:
        """The tokens of a sequence in the columns, pending ones included."""
        return int(self.positions[self._place_of[group]]) + 1

    def tokens_of(self, sequence: Sequence) -> list[int]:
        """The sequence's own list of tokens, brought up to date."""
        place, known = self._place_of[sequence.group], sequence.own_token_ids
        while known[-1] == PENDING:
            known.pop()
        certain, width = int(self.certain[place]), self._recent.shape[1]
        first = len(known)
        if first <= certain:
            recent = self._recent[place].tolist()
            known.extend([recent[position % width] for position in range(first, certain + 1)])
        known.extend([PENDING] * (int(self.positions[place]) - certain))
        return known

    # ---- a step ---------------------------------------------------------------------------------------------------

    def layout(self, running: list[Group]) -> Layout:
        """The order of the rows; `running`: all running groups in the order of service."""
        if self._layout is None:
            self._layout, self._laid_out = self._arranged(running), list(running)
        elif self._laid_out != running:  # others have
            self._layout = replace(self._layout, behind=self._behind(running))
            self._laid_out = list(running)
        return self._layout

    def to_serve(self, running: list[Group]) -> Iterator[Group]:
        """The running groups of which a plan must take notice, in the order of service: rows whose last block is
        full, and all groups that have no row."""
        layout = self.layout(running)
        if not layout.groups:
            yield from layout.behind
            return
        grows = np.flatnonzero(self.positions[layout.places] == self._slots[layout.places]).tolist()
        at = 0
        for group, behind in layout.behind.items():
            while at < len(grows) and grows[at] < behind:
                yield layout.groups[grows[at]]
                at += 1
            yield group
        for row in grows[at:]:
            yield layout.groups[row]

    def grow(self, sequence: Sequence) -> None:
        """One more block for a row whose last one is full."""
        self._kv.reserve_block(sequence)
        self._take_table(self._place_of[sequence.group], sequence)

    def planned(self, running: list[Group]) -> tuple[Decodes, Layout]:
        """The rows as a part of a step that is about to be planned whole."""
        layout = self.layout(running)
        places = layout.places
        positions = self.positions[places]
        width = -(-int(self._slots[places].max()) // self._size)
        decodes = Decodes(
            rows=layout.rows,
            sequence_ids=layout.sequence_ids,
            token_ids=np.where(self.certain[places] == positions, self._tokens[places], PENDING),
            positions=positions,
            block_ids=tuple(map(self._block_ids.__getitem__, places.tolist())),
            tables=np.take(self._tables[:, :width], places, axis=0),
            draws=layout.draws,
            places=places,
            tenures=self._tenures[places],
        )
        return decodes, layout

    def advance(self, decodes: Decodes) -> None:
        """The rows, all of which are here, are in flight; those whose last token is with them leave."""
        self.positions[decodes.places] += 1
        last = np.flatnonzero(decodes.positions + 2 == self._ends[decodes.places])
        for place in decodes.places[last].tolist():
            group = self._groups[place]
            (sequence,) = group.sequences
            self.leave(sequence)
            group.note_launched(sequence)

    def take(self, decodes: Decodes, ids: Column) -> Taken:
        """Take the tokens of the rows that are here yet and go on; `ids` [N], negative where a row has none."""
        places, ends = decodes.places, decodes.positions + 1
        goes_on = (self._tenures[places] == decodes.tenures) & (ids >= 0)
        goes_on &= ~(ids[:, None] == self._stops[places]).any(axis=1)
        full = np.flatnonzero(goes_on & (ends % self._size == 0)).tolist()
        left = np.flatnonzero(~goes_on).tolist()
        layout = self._layout
        if left:
            places, ends, ids = places[goes_on], ends[goes_on], ids[goes_on]
        if left or layout is None or layout.rows is not decodes.rows:
            streams = tuple([self._streams[place] for place in places.tolist()])
            accounts = self._accounts(places)
        else:
            streams, accounts = layout.streams, layout.accounts
        self.certain[places] = ends
        self._tokens[places] = ids
        self._recent[places, ends % self._recent.shape[1]] = ids
        return Taken(streams=streams, ids=ids, accounts=accounts, left=left, full=full)

    def take_one(self, sequence: Sequence, position: int, token_id: int) -> bool:
        """Take the token at `position` of a sequence that has come since its step was planned; False if it ends it."""
        place = self._place_of[sequence.group]
        if token_id in sequence.group.stop_token_ids:
            return False
        self.certain[place], self._tokens[place] = position, token_id
        self._recent[place, position % self._recent.shape[1]] = token_id
        if position % self._size == 0:
            self.note_full(sequence)
        return True

    def note_full(self, sequence: Sequence) -> None:
        """The tokens with applied results fill the last block that they are in."""
        place = self._place_of[sequence.group]
        self.tokens_of(sequence)  # which the columns have no place for much longer
        self._kv.commit_block(sequence, int(self.certain[place]))
        self._take_table(place, sequence)

    def sequence(self, decodes: Decodes, row: int) -> Sequence:
        """The sequence of a row that `take` has taken."""
        (sequence,) = self._groups[int(decodes.places[row])].sequences
        return sequence

    # ---- sums and checks ------------------------------------------------------------------------------------------

    def num_unused_slots(self, running: list[Group]) -> int:
        """Token slots in the rows' blocks that hold no token."""
        if not self._place_of:  # as with few streams, where the time of numpy's calls shows
            return 0
        return int(self.unused_slots(running).sum())

    def unused_slots(self, running: list[Group]) -> Column:
        """Return for each row the token slots in its blocks that hold no token."""
        places = self.layout(running).places
        return self._slots[places] - self.positions[places]

    def check(self, running: list[Group]) -> None:
        """Raise InvariantViolation unless every row is that of a running sequence and has its tables and blocks."""
        here = [group for group in running if group in self._place_of]
        require(len(here) == len(self._place_of), "a row is that of a group that does not run")
        require(len(self._free) + len(self._place_of) == len(self._ends), "a place is neither free nor taken")
        for group in here:
            place, (sequence,) = self._place_of[group], group.sequences
            table = sequence.kv.table
            name = f"row {place}, of request {group.request.request_id}"
            require(sequence.columns is self and group.is_plain, f"{name}: its sequence does not know of it")
            require(self._block_ids[place] == table.block_ids, f"{name}: other blocks than its table's")
            known = self._tables[place, : len(table)].tolist()
            require(known == list(table.block_ids), f"{name}: the columns have other blocks")
            require(int(self._slots[place]) == table.num_slots, f"{name}: other slots than its table's")
            require(self.certain[place] <= self.positions[place], f"{name}: results of steps that are not planned")
            tokens = sequence.token_ids
            require(tokens[int(self.certain[place])] == int(self._tokens[place]), f"{name}: another last token")

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _join(self, sequence: Sequence) -> None:
        group, kv, place = sequence.group, sequence.kv, self._free.pop()
        self.positions[place], self.certain[place] = kv.num_computed, kv.num_certain
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
        sequence.enter_columns(self, ColumnKV(kv, self, place))
        self._place_of[group], self._groups[place] = place, group
        self._take_table(place, sequence)
        self._layout = None

    def _take_table(self, place: int, sequence: Sequence) -> None:
        """The blocks of a row have changed."""
        table = sequence.kv.table
        known, now = self._block_ids.get(place, ()), table.block_ids
        first = len(known) if now[: len(known)] == known else 0
        self._tables[place, first : len(now)] = now[first:]
        self._block_ids[place] = now
        self._slots[place] = table.num_slots

    def _arranged(self, running: list[Group]) -> Layout:
        groups = [group for group in running if group in self._place_of]
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
            behind=self._behind(running),
            num_batch=sum(group.is_batch for group in groups),
            draws=any(group.sampling.temperature != 0.0 for group in groups),
        )

    def _behind(self, running: list[Group]) -> dict[Group, int]:
        """Return how many rows are served before each running group without a row."""
        behind: dict[Group, int] = {}
        num_rows = 0
        for group in running:
            if group in self._place_of:
                num_rows += 1
            else:
                behind[group] = num_rows
        return behind

    def _accounts(self, places: Column) -> Counter[Account]:
        """How many of the rows each account has."""
        groups = self._groups
        return Counter([a for place in places.tolist() if (a := groups[place].account) is not None])
