"""The records of what adapters add to matrices, and the interface of the places that a device has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankPart:
    """B A, which an adapter (LoRA, Hu et al. 2021, arXiv:2106.09685) adds to some rows of a matrix, times `scale`."""

    first_row: int  # of the matrix; of a gate-up pair, the gate's rows come before up's
    shrink: Tensor  # A [r, K]
    expand: Tensor  # B [n, r]
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankMatrix:
    """The parts that an adapter adds to one matrix [N, K]; no row is in two of them."""

    num_rows: int  # N; of a gate-up pair both together
    num_inputs: int  # K
    gate_up: bool
    parts: tuple[LowRankPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankExperts:
    """The parts that an adapter adds to one matrix [N, K] of each of E experts: A is [E, r, K] and B [E, n, r]."""

    count: int  # E
    num_rows: int  # N, without the rows that a matrix is filled up with
    num_inputs: int
    gate_up: bool
    parts: tuple[LowRankPart, ...]

    def of(self, expert: int) -> LowRankMatrix:
        """One expert's."""
        parts = tuple([replace(part, shrink=part.shrink[expert], expand=part.expand[expert]) for part in self.parts])
        return LowRankMatrix(num_rows=self.num_rows, num_inputs=self.num_inputs, gate_up=self.gate_up, parts=parts)


# A `LowRankMatrix` or `LowRankExperts` in the implementation's form. Opaque to the model.
LowRank = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedProduct:
    """A matrix [N, K] that any adapter may add to, in at most three parts."""

    num_rows: int
    num_inputs: int
    starts: tuple[int, ...]  # the first row of each part, 0 at first


class Places(Protocol):
    """Places for adapters in a device's memory, each with room for the largest one. By site `LowRank | None`."""

    @property
    def count(self) -> int: ...
    def __getitem__(self, site: int) -> LowRank | None: ...
    def place(self, index: int) -> Tensor:
        """[n] uint8: all of a place, to which what `fill` wrote is copied."""
        ...

    def fill(self, host: Tensor, matrices: Mapping[int, LowRankMatrix]) -> None:
        """Write an adapter to host memory [n] uint8. ValueError where it does not fit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOps:
    """How a set keeps adapters whose steps a device computes by itself.

    make(products by site, count, max_rank, dtype, device) -> Places
    num_bytes(products, max_rank, itemsize) -> int
        Of one place.
    scratch(products, max_rank, rows) -> int
        Bytes of a step's temporary memory, beyond those of a step without adapters.
    """

    make: Callable[[Sequence[AdaptedProduct | None], int, int, torch.dtype, torch.device], Places]
    num_bytes: Callable[[Sequence[AdaptedProduct | None], int, int], int]
    scratch: Callable[[Sequence[AdaptedProduct | None], int, int], int]
