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

from quire_kernels.kernel_set import AttentionInput, AttentionRows


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
    rows: AttentionRows  # the same sequences as a step of their own
    blocks: Tensor | None = None  # [keys] int64, of all sequences' keys one after the other; where they are asked for
    offsets: Tensor | None = None  # [keys] int64, in their blocks

    @property
    def max_rows(self) -> int:
        """The `max_query_len` argument for sequences that may be without rows.

        With 1, flash-attn 2 assumes that every sequence has a row, and ignores the offsets.
        """
        return self.max_query_len if self.decodes else max(2, self.max_query_len)


def parts_of(step: AttentionInput, *, decodes_apart: bool, page: int = 0) -> tuple[Part, ...]:
    """All sequences with rows, in order; `decodes_apart`: the longest run of single rows is a part of its own.

    `page`: of a pool whose places of keys are asked for, tokens; 0: they are not.
    """
    query_lens = step.query_lens
    first, stop = _longest_run_of_ones(query_lens) if decodes_apart else (0, 0)
    starts = [0, *accumulate(query_lens)]
    found = []
    for low, high in ((0, first), (first, stop), (stop, len(query_lens))):
        if starts[low] == starts[high]:
            continue
        context_lens = step.context_lens[low:high]
        query_starts = step.query_starts[low : high + 1]
        query_starts = query_starts - starts[low] if starts[low] else query_starts
        context_starts = F.pad(torch.cumsum(context_lens, 0, dtype=torch.int32), (1, 0))
        block_tables, kv_lens = step.block_tables[low:high], tuple(step.kv_lens[low:high])
        decodes = (low, high) == (first, stop)
        blocks = offsets = None
        if page and not decodes:
            blocks, offsets = _places(context_starts, block_tables, sum(kv_lens), page)
        found.append(
            Part(
                first_row=starts[low],
                num_rows=starts[high] - starts[low],
                decodes=decodes,
                query_starts=query_starts,
                context_lens=context_lens,
                context_starts=context_starts,
                block_tables=block_tables,
                max_query_len=max(query_lens[low:high]),
                max_context_len=max(kv_lens),
                rows=AttentionRows(
                    positions=step.positions[starts[low] : starts[high]],
                    kv_slots=step.kv_slots[starts[low] : starts[high]],
                    query_starts=query_starts,
                    context_lens=context_lens,
                    block_tables=block_tables,
                    query_lens=tuple(query_lens[low:high]),
                    kv_lens=kv_lens,
                    max_query_len=max(query_lens[low:high]),
                    max_context_len=max(kv_lens),
                ),
                blocks=blocks,
                offsets=offsets,
            )
        )
    return tuple(found)


def _places(context_starts: Tensor, block_tables: Tensor, num_keys: int, page: int) -> tuple[Tensor, Tensor]:
    """The blocks of all sequences' keys, and the offsets in them, [num_keys] int64 each."""
    keys = torch.arange(num_keys, dtype=torch.int32, device=context_starts.device)
    sequences = torch.searchsorted(context_starts, keys, right=True) - 1
    positions = keys.long() - context_starts[sequences]
    return block_tables[sequences, positions // page].long(), positions % page


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
