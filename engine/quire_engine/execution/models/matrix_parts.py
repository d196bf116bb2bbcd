"""The rows of stored tensors that a model's matrices are made of, and the interface of what gives them.

Promises: the parts of a matrix have the names of the checkpoint's tensors. Must not know: sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quire_kernels.kernel_set import LinearWeight


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a stored tensor, perhaps with the values of each head in another order."""

    name: str
    start: int = 0
    stop: int | None = None
    head_order: Tensor | None = None  # [head_dim]: the stored place of each
    filled: int = 0  # rows of zeros follow, up to so many in all

    def named(self, kind: str) -> Part:
        return replace(self, name=self.name + kind)

    def pieces(self, stored: Tensor) -> list[Tensor]:
        """The rows, and the zeros that follow."""
        rows = self.of(stored)
        zeros = max(0, self.filled - len(rows))
        return [rows, rows.new_zeros(1).expand(zeros, *rows.shape[1:])] if zeros else [rows]

    def filled_rows(self, stored: Tensor) -> Tensor:
        """The rows and the zeros that follow, in a tensor of their own where there are zeros."""
        pieces = self.pieces(stored)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def of(self, stored: Tensor) -> Tensor:
        rows = stored[self.start : self.stop]
        if self.head_order is None:
            return rows
        return rows.view(-1, len(self.head_order), *rows.shape[1:])[:, self.head_order].flatten(0, 1)


def rows_of(parts: Sequence[Part], sizes: Sequence[int], wanted: Sequence[slice]) -> list[Part]:
    """The parts of some rows, in the order of `wanted`, of the matrix that parts of so many rows each make."""
    found = []
    for each in wanted:
        at = 0
        for part, size in zip(parts, sizes, strict=True):
            low, high = max(each.start, at), min(each.stop, at + size)
            if low < high:
                found.append(replace(part, start=part.start + low - at, stop=part.start + high - at))
            at += size
    return found


class WeightSource(Protocol):
    """Gives each tensor once, by its name in the checkpoint, and each matrix once, by its place in the decoder.

    From every source the same bits.
    """

    def tensor(self, name: str, *, wide: bool = False) -> Tensor:
        """Return a tensor in the model's dtype; `wide`: in float32."""
        ...

    def matrix(self, place: str, weights: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        """One projection made of the rows of several."""
        ...

    def gate_up(self, place: str, gate: Sequence[Part], up: Sequence[Part], biases: Sequence[Part]) -> LinearWeight: ...

    def stored_table(self, place: str, name: str) -> LinearWeight | None:
        """A matrix whose rows are looked up, as it is stored; None: `tensor` gives its numbers."""
        ...

    def head(self, place: str, name: str, embedding: Tensor | None, rows: slice | None = None) -> LinearWeight:
        """The last projection, or some of its rows; `embedding` is what `tensor` gave for it where both are one."""
        ...
