"""Addends of adapters to the products of a GPU: two launches for each, whatever rows have which adapter.

Promises: launches follow from the numbers of rows and of places, so a captured graph serves any choice of adapters, and
nothing waits for the device. A row without an adapter is not touched. A row's sums have one order each: over k within
spans of columns, of these spans one after the other, then over the ranks; so its bits do not depend on the other rows.

The projection is rounded to the rows' type before the addend, which is float32, is added and the sum rounded again:
products are those of the libraries, which give no wider sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.adapter_places import PlacedMatrix, padded_rank
from quire_kernels.kernel_set import Addend
from quire_kernels.low_rank import AdaptedProduct

_ROWS = 16  # of a tile, for any number of rows: others could be other instructions
_BLOCK_K = 128
_SPAN = 1024  # columns of x that one program adds up: by it alone, so that a few rows have many programs
_COLUMNS = 128  # of a tile of results


@triton.jit
def shrink_kernel(  # noqa: PLR0917
    x, shrink, row_places, found, num_rows, depth, place_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """found [spans, T, P, r] = the sums over a span of columns of x [T, K] and of each row's own A [P, r, K].

    Programs: (row tiles, places, spans * parts). One ends at once where no row of its tile has its place's adapter.
    """
    place, part, span = tl.program_id(1), tl.program_id(2) % PARTS, tl.program_id(2) // PARTS
    rows, ranks = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, RANK)
    mine = tl.load(row_places + rows, mask=rows < num_rows, other=-1) == place
    if tl.sum(mine.to(tl.int32), 0) > 0:
        total = tl.zeros([BLOCK_M, RANK], tl.float32)
        own = shrink + place.to(tl.int64) * place_stride + part.to(tl.int64) * RANK * depth
        for k in range(span * SPAN, tl.minimum(depth, (span + 1) * SPAN), BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            here = (ks < depth)[None, :]
            a = tl.load(x + rows.to(tl.int64)[:, None] * depth + ks[None, :], mask=mine[:, None] & here, other=0.0)
            b = tl.load(own + ranks[:, None] * depth + ks[None, :], mask=here, other=0.0)
            total = tl.dot(a, tl.trans(b), total)
        into = found + ((span.to(tl.int64) * num_rows + rows)[:, None] * PARTS + part) * RANK + ranks[None, :]
        tl.store(into, total, mask=mine[:, None])


@triton.jit
def expand_kernel(  # noqa: PLR0917
    out, found, expand, scales, row_places, num_rows, num_columns, second, third, place_stride, scale_stride, factor,
    SPANS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [T, N] += factor * B (scale * the sum of `found` over the spans), of the rows of each place's adapter.

    Programs: (row tiles, places, tiles of the columns of each part). Part 1 begins at column `second`, part 2 at
    `third`. B's values are of the rows' type; what they multiply is so in two parts, whose sum is as good as float32.
    """
    place, tile = tl.program_id(1), tl.program_id(2)
    rows, ranks = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, RANK)
    mine = tl.load(row_places + rows, mask=rows < num_rows, other=-1) == place
    if tl.sum(mine.to(tl.int32), 0) > 0:
        part, first, end = 0, 0, num_columns
        if PARTS > 1:
            before = tl.cdiv(second, BLOCK_N)
            behind = before + tl.cdiv(third - second, BLOCK_N)
            part = (tile >= before).to(tl.int32) + (tile >= behind).to(tl.int32)
            first = tl.where(part == 0, 0, tl.where(part == 1, second, third))
            end = tl.where(part == 0, second, tl.where(part == 1, third, num_columns))
            tile -= tl.where(part == 0, 0, tl.where(part == 1, before, behind))
        columns = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < end
        h = tl.zeros([BLOCK_M, RANK], tl.float32)
        for span in tl.static_range(SPANS):
            at = ((span * num_rows + rows.to(tl.int64))[:, None] * PARTS + part) * RANK + ranks[None, :]
            h += tl.load(found + at, mask=mine[:, None], other=0.0)
        h *= tl.load(scales + place * scale_stride + part)
        own = expand + place.to(tl.int64) * place_stride + columns.to(tl.int64)[:, None] * RANK + ranks[None, :]
        b = tl.trans(tl.load(own, mask=inside[:, None], other=0.0))
        high = h.to(b.dtype)
        total = tl.dot((h - high.to(tl.float32)).to(b.dtype), b)
        total = tl.dot(high, b, total)
        into = out + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        kept = mine[:, None] & inside[None, :]
        value = tl.load(into, mask=kept, other=0.0).to(tl.float32) + factor * total
        tl.store(into, value.to(out.dtype.element_ty), mask=kept)


def add_adapted(out: Tensor, x: Tensor, addend: Addend, factor: float = 1.0) -> Tensor:
    """out [T, N] += factor * B A x, in place, of the rows x [T, K] that have an adapter.

    `addend` has the places of the rows' adapters, and one `PlacedMatrix`. ValueError where it does not fit.
    """
    matrix = cast(PlacedMatrix, addend.matrices[0])
    (num_rows, depth), num_columns = x.shape, out.shape[1]
    _check(out, x, addend.slots, matrix)
    if not num_rows:
        return out
    places, parts, rank, _ = matrix.shrink.shape
    spans, tiles = triton.cdiv(depth, _SPAN), triton.cdiv(num_rows, _ROWS)
    found = torch.empty(spans, num_rows, parts, rank, dtype=torch.float32, device=x.device)
    x = x.contiguous()
    shrink_kernel[tiles, places, spans * parts](
        x, matrix.shrink, addend.slots, found, num_rows, depth, matrix.shrink.stride(0),
        PARTS=parts, RANK=rank, SPAN=_SPAN, BLOCK_M=_ROWS, BLOCK_K=_BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    starts = (*matrix.starts, num_columns)
    second, third = starts[1], starts[min(2, parts)]
    columns = sum(triton.cdiv(starts[i + 1] - starts[i], _COLUMNS) for i in range(parts))
    expand_kernel[tiles, places, columns](
        out, found, matrix.expand, matrix.scales, addend.slots, num_rows, num_columns, second, third,
        matrix.expand.stride(0), matrix.scales.stride(0), float(factor),
        SPANS=spans, PARTS=parts, RANK=rank, BLOCK_M=_ROWS, BLOCK_N=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def scratch(products: Sequence[AdaptedProduct | None], max_rank: int, rows: int) -> int:
    """Bytes of the sums between both launches, at most; a graph keeps those of one product at a time."""
    return max(
        (
            4 * rows * len(each.starts) * padded_rank(max_rank) * -(-each.num_inputs // _SPAN)
            for each in products
            if each
        ),
        default=0,
    )


def _check(out: Tensor, x: Tensor, row_places: Tensor, matrix: PlacedMatrix) -> None:
    _, parts, _, depth = matrix.shrink.shape
    num_columns = matrix.expand.shape[1]
    if x.shape[1] != depth or out.shape != (len(x), num_columns) or matrix.shrink.dtype != x.dtype:
        raise ValueError(
            f"{x.dtype} rows {list(x.shape)} and results {list(out.shape)} do not fit an adapter of"
            f" {matrix.shrink.dtype} {depth} -> {num_columns}"
        )
    if not out.is_contiguous():
        raise ValueError("results must be contiguous")
    if row_places.dtype != torch.int32 or row_places.shape != (len(x),) or not row_places.is_contiguous():
        raise ValueError(f"the places of adapters must be contiguous int32 [{len(x)}]")
    if not 1 <= parts <= 3:
        raise ValueError(f"{parts} parts of a matrix cannot be added to")
