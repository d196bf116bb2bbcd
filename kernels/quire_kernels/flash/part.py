"""The sequences of a step that one call of a library computes (`Part`), and the division of a step into parts.

Promises: no call waits for the device, since the division depends on host values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.kernel_set import AttentionInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """b consecutive sequences of a step, with t rows in all."""

    first_row: int  # in the step
    num_rows: int  # t, at least 1
    decodes: bool  # every sequence has exactly one row
    query_starts: Tensor  # [b + 1] int32, row offsets, from 0
    context_lens: Tensor  # [b] int32, tokens present after this step
    context_starts: Tensor  # [b + 1] int32, their cumulative sums, from 0
    block_tables: Tensor  # [b, M] int32
    max_query_len: int
    max_context_len: int

    @property
    def max_rows(self) -> int:
        """The `max_query_len` argument for sequences that may be without rows.

        With 1, flash-attn 2 assumes that every sequence has a row, and ignores the offsets.
        """
        return self.max_query_len if self.decodes else max(2, self.max_query_len)


def parts_of(step: AttentionInput, *, decodes_apart: bool) -> tuple[Part, ...]:
    """All sequences with rows, in order; `decodes_apart`: the longest run of single rows is a part of its own."""
    query_lens = step.query_lens
    first, stop = _longest_run_of_ones(query_lens) if decodes_apart else (0, 0)
    starts = [0, *accumulate(query_lens)]
    found = []
    for low, high in ((0, first), (first, stop), (stop, len(query_lens))):
        if starts[low] == starts[high]:
            continue
        context_lens = step.context_lens[low:high]
        query_starts = step.query_starts[low : high + 1]
        found.append(
            Part(
                first_row=starts[low],
                num_rows=starts[high] - starts[low],
                decodes=(low, high) == (first, stop),
                query_starts=query_starts - starts[low] if starts[low] else query_starts,
                context_lens=context_lens,
                context_starts=F.pad(torch.cumsum(context_lens, 0, dtype=torch.int32), (1, 0)),
                block_tables=step.block_tables[low:high],
                max_query_len=max(query_lens[low:high]),
                max_context_len=max(step.kv_lens[low:high]),
            )
        )
    return tuple(found)


def _longest_run_of_ones(query_lens: Sequence[int]) -> tuple[int, int]:
    """Decode rows are consecutive in a step, except those of the elder, which is served first."""
    best = (0, 0)
    first = 0
    for at, rows in enumerate(query_lens):
        if rows != 1:
            first = at + 1
        elif at + 1 - first > best[1] - best[0]:
            best = (first, at + 1)
    return best
