"""Places for adapters in a device's memory, each with room for the largest one, where captured steps find them.

Owns their layout. Promises: a place's matrices lie at the same addresses whatever adapter is there; ranks and matrices
that an adapter lacks are zeros.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.low_rank import AdaptedProduct, LowRankMatrix

_LEAST_RANK = 16  # that a matrix instruction takes
_ALIGNMENT = 256


class PlacedMatrix(NamedTuple):
    """One product's matrices of every place: S places, P parts of N rows, each of rank r."""

    shrink: Tensor  # [S, P, r, K]
    expand: Tensor  # [S, N, r]; a row has the ranks of its part
    scales: Tensor  # [S, P] float32
    starts: tuple[int, ...]  # P, the first row of each part


class _Section(NamedTuple):
    """The offsets of a product's matrices within a place, in bytes."""

    shrink: int
    expand: int
    scales: int
    end: int


class AdapterPlaces:
    """See `kernel_set.Places`."""

    def __init__(
        self,
        products: Sequence[AdaptedProduct | None],
        count: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`products`: by site."""
        self._products, self._dtype = tuple(products), dtype
        self._rank = padded_rank(max_rank)
        self._sections = _sections(products, max_rank, dtype.itemsize)
        size = place_bytes(products, max_rank, dtype.itemsize)
        self._memory = torch.zeros(count, size, dtype=torch.uint8, device=device)
        self._sites = tuple(
            None if product is None or section is None else self._views(self._memory, product, section)
            for product, section in zip(self._products, self._sections, strict=True)
        )

    @property
    def count(self) -> int:
        return len(self._memory)

    def __getitem__(self, site: int) -> PlacedMatrix | None:
        return self._sites[site]

    def place(self, index: int) -> Tensor:
        return self._memory[index]

    def fill(self, host: Tensor, matrices: Mapping[int, LowRankMatrix]) -> None:
        host.zero_()
        for site, matrix in matrices.items():
            product, section = self._products[site], self._sections[site]
            shape = None if product is None else (product.num_rows, product.num_inputs)
            if product is None or section is None or shape != (matrix.num_rows, matrix.num_inputs):
                raise ValueError(f"an adapter does not fit the product at site {site}")
            views = self._views(host[None], product, section)
            for part in matrix.parts:
                (rows, rank), index = part.expand.shape, bisect_right(product.starts, part.first_row) - 1
                ends = (*product.starts, product.num_rows)
                if rank > self._rank or part.first_row + rows > ends[index + 1]:
                    raise ValueError(f"a part of an adapter does not fit the product at site {site}")
                views.shrink[0, index, :rank] = part.shrink
                views.expand[0, part.first_row : part.first_row + rows, :rank] = part.expand
                views.scales[0, index] = part.scale

    def _views(self, memory: Tensor, product: AdaptedProduct, at: _Section) -> PlacedMatrix:
        """Return views of a product's matrices in places [S, bytes]."""
        rank, parts, rows = self._rank, len(product.starts), product.num_rows

        def view(offset: int, dtype: torch.dtype, *shape: int) -> Tensor:
            size = math.prod(shape) * dtype.itemsize
            return memory[:, offset : offset + size].view(dtype).view(len(memory), *shape)

        return PlacedMatrix(
            shrink=view(at.shrink, self._dtype, parts, rank, product.num_inputs),
            expand=view(at.expand, self._dtype, rows, rank),
            scales=view(at.scales, torch.float32, parts),
            starts=product.starts,
        )


def place_bytes(products: Sequence[AdaptedProduct | None], max_rank: int, itemsize: int) -> int:
    """Return the bytes of one place."""
    return max((section.end for section in _sections(products, max_rank, itemsize) if section is not None), default=0)


def _sections(products: Sequence[AdaptedProduct | None], max_rank: int, itemsize: int) -> tuple[_Section | None, ...]:
    rank, end, found = padded_rank(max_rank), 0, list[_Section | None]()

    def take(size: int) -> int:
        nonlocal end
        begin, end = end, end + -(-size // _ALIGNMENT) * _ALIGNMENT
        return begin

    for product in products:
        if product is None:
            found.append(None)
            continue
        parts = len(product.starts)
        shrink = take(parts * rank * product.num_inputs * itemsize)
        expand = take(product.num_rows * rank * itemsize)
        found.append(_Section(shrink, expand, take(parts * 4), end))
    return tuple(found)


def padded_rank(rank: int) -> int:
    """A power of two.

    >>> padded_rank(3), padded_rank(17)
    (16, 32)
    """
    return max(_LEAST_RANK, 1 << (rank - 1).bit_length())
