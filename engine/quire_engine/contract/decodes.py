"""The plain decodes of a step in columns, between the scheduler and the executors, and a batch that has some.

Promises: a snapshot, as every `Batch` is; `items` and `item` give what a batch without columns has. Must not know:
torch, queues, policies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire_engine.contract.batch import Batch, ScheduledSequence
from quire_engine.contract.types import SamplingParams, StopParams

Column = NDArray[np.int64]


class DecodeRow(NamedTuple):
    """The part of a row that does not change while its sequence decodes in the columns."""

    sequence_id: int
    choice: int
    run: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """N sequences that compute one token each and sample the next, without rules, log-probabilities or forks.

    They are in the order in which the plan serves them. `rows` is the same tuple in the next step if the rows are.
    """

    rows: tuple[DecodeRow, ...]  # [N]
    sequence_ids: Column  # [N]
    token_ids: Column  # [N], PENDING where the step before samples it
    positions: Column  # [N], of that token
    block_ids: tuple[tuple[int, ...], ...]  # [N]
    tables: NDArray[np.int32]  # [N, M]: the same blocks, M of the longest; behind the others' own lies anything
    draws: bool  # whether some token is drawn, not the maximum
    places: Column  # [N], of the rows in the columns
    tenures: Column  # [N], of the sequences in these places

    def __len__(self) -> int:
        return len(self.rows)

    def kv_slots(self, block_size: int) -> Column:
        """[N], block_id * block_size + offset of each token."""
        blocks = self.tables[np.arange(len(self.rows)), self.positions // block_size]
        return blocks * np.int64(block_size) + self.positions % block_size

    def item(self, at: int) -> ScheduledSequence:
        """A row as a slice of its own."""
        row = self.rows[at]
        return ScheduledSequence(
            sequence_id=row.sequence_id,
            choice=row.choice,
            run=row.run,
            prompt_token_ids=row.prompt_token_ids,
            output_token_ids=(),
            token_ids=(int(self.token_ids[at]),),
            start=int(self.positions[at]),
            block_ids=self.block_ids[at],
            wants_sample=True,
            wants_prompt_logprobs=False,
            forks=(),
            sampling=row.sampling,
            stop=row.stop,
        )


class BatchInColumns(Batch):
    """A batch whose plain decodes are columns. `items` are made when they are read, and then all of them.

    `others` are the other slices. Slice i of them comes behind `behind[i]` rows of the columns.
    """

    __slots__ = ("_items", "_others", "behind", "decodes")

    decodes: Decodes
    behind: Sequence[int]
    _others: tuple[ScheduledSequence, ...]
    _items: tuple[ScheduledSequence, ...] | None

    def __init__(
        self, *, decodes: Decodes, others: tuple[ScheduledSequence, ...], behind: Sequence[int], **fields: Any
    ) -> None:
        """`fields`: those of `Batch` but for its items."""
        put = object.__setattr__  # as the other fields, these are never changed
        put(self, "decodes", decodes)
        put(self, "behind", behind)
        put(self, "_others", others)
        put(self, "_items", None)
        for name, value in (_DEFAULTS | fields).items():
            put(self, name, value)

    @property
    def items(self) -> tuple[ScheduledSequence, ...]:
        if self._items is None:
            rows = [self.decodes.item(at) for at in range(len(self.decodes))]
            parts, first = list[list[ScheduledSequence]](), 0
            for item, place in zip(self._others, self.behind, strict=True):
                parts += [rows[first:place], [item]]
                first = place
            made = (*chain.from_iterable(parts), *rows[first:])
            object.__setattr__(self, "_items", made)
            return made
        return self._items

    @property
    def others(self) -> tuple[ScheduledSequence, ...]:
        return self._others

    @property
    def num_items(self) -> int:
        return len(self.decodes) + len(self._others)

    @property
    def rows_context(self) -> int:
        return int(self.decodes.positions.sum()) + len(self.decodes)

    def merged_column(self, rows: Column, others: Sequence[int]) -> array[int]:
        """A number of each row and one of each other slice, in the order of the batch."""
        merged = array("q")
        merged.frombytes((np.insert(rows, self.behind, others) if others else rows).tobytes())
        return merged

    def whole(self) -> Batch:
        return Batch(items=self.items, **{name: getattr(self, name) for name in _DEFAULTS})


_DEFAULTS: dict[str, Any] = {
    "step_id": 0,
    "num_tokens": 0,
    "num_decodes": 0,
    "swap_out": (),
    "swap_in": (),
    "swap_keys": (),
    "copies": (),
    "released": (),
}
