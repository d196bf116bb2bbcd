"""Steps over a paged pool as inputs for the ops of a kernel set.

Promises: blocks are scattered, block 0 belongs to no sequence, and block tables are padded with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.kernel_set import AttentionRows


class Slice(NamedTuple):
    """Rows of one sequence that a step computes."""

    sequence: int
    start: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(AttentionRows):
    """A `StepInput`."""

    sample_rows: Tensor
    sampled: AttentionRows | None


class Tables:
    """Block tables of some sequences in shuffled order, and one spare block."""

    def __init__(self, lengths: Sequence[int], block_size: int, seed: int = 0) -> None:
        counts = [-(-length // block_size) for length in lengths]
        self.block_size, self.lengths = block_size, tuple(lengths)
        self.num_blocks = 2 + sum(counts)  # block 0 and the spare one
        ids = list(range(1, self.num_blocks))
        random.Random(seed).shuffle(ids)
        ends = list(accumulate(counts, initial=0))
        self.blocks = [ids[start:end] for start, end in pairwise(ends)]
        self.spare = ids[-1]

    def whole(self) -> list[Slice]:
        """All rows of all sequences."""
        return [Slice(sequence, 0, length) for sequence, length in enumerate(self.lengths)]

    def rows(self, slices: Sequence[Slice], device: torch.device) -> AttentionRows:
        """The step that computes these, in this order."""
        width = max(-(-part.end // self.block_size) for part in slices)
        positions, slots, tables = [], [], []
        for part in slices:
            blocks = self.blocks[part.sequence]
            used = -(-part.end // self.block_size)
            tables.append([*blocks[:used], *[0] * (width - used)])
            for position in range(part.start, part.end):
                positions.append(position)
                slots.append(blocks[position // self.block_size] * self.block_size + position % self.block_size)
        lens = tuple(part.rows for part in slices)
        ends = tuple(part.end for part in slices)
        return AttentionRows(
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            kv_slots=torch.tensor(slots, dtype=torch.int64, device=device),
            query_starts=torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32, device=device),
            context_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            query_lens=lens,
            kv_lens=ends,
            max_query_len=max(lens),
            max_context_len=max(ends),
        )

    def step(self, slices: Sequence[Slice], device: torch.device) -> Step:
        """A step that samples only each slice's last row."""
        every = self.rows(slices, device)
        last = self.rows([Slice(part.sequence, part.end - 1, 1) for part in slices], device)
        return Step(
            **{name: getattr(every, name) for name in AttentionRows.__slots__},
            sample_rows=every.query_starts[1:].to(torch.int64) - 1,
            sampled=last,
        )
