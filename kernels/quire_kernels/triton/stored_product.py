"""Products with matrices as others quantised them: codes of 4 or 8 bits are decoded in the loop over k.

Promises: a weight is the very number that the checkpoint says. Codes less their zero points are integers of nine bits
at most, or e4m3, and both are exact in bfloat16 and in float16; a group's products are summed in float32, and the sum
is multiplied by the group's scale. The order of all sums depends on the weight only, and on the number of rows no more
than that of `product`.

A packed matrix has its columns in pairs of halves of HALF columns, padded with code 0, which meets rows of zeros. Two
codes of four bits lie in one byte: that of the first half below that of the second. So a byte is read once and each of
its codes is where a product needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.stored import (
    StoredKind,
    StoredMatrix,
    joined,
    narrowest,
    with_floats,
    without_equal_zero_points,
)
from quire_kernels.triton.e4m3 import DECODED, decode_e4m3
from quire_kernels.triton.product import num_programs, store_tile

_DECODED = tl.constexpr(DECODED)
_LEAST_GROUP, _WIDE_HALF = 32, 64  # columns
_FEW_ROWS, _ROWS = 16, 64  # of a tile
_COLUMNS = 32  # of a tile: decoded codes are in registers beside the sums
_MOST_REGISTERS = 255  # without a bound ptxas spills a few values in the loop to fit one more block
_BITS: dict[StoredKind, tuple[int, int]] = {"nibbles": (4, 24), "six_bits": (8, 24), "bytes": (8, 24), "e4m3": (8, 32)}
_PLAIN = (16, 32)  # bits of a group's scale that has no unit
_MOST_BASE = 128


class StoredLinear(NamedTuple):
    """A projection by (the value of the code - zero point) * scale + offset, and a bias."""

    kind: StoredKind
    columns: int  # K
    half: int  # columns of a half
    group: int  # columns that share a scale, a multiple of `half`
    base: int  # of nibbles without a table: the value of code 0, from which each code's is one more
    table: Tensor | None  # of other nibbles, [16] float32
    codes: Tensor  # [N, padded K / 2] of nibbles, else [N, padded K] uint8
    scales: Tensor  # [G, N]
    zero_points: Tensor | None  # [G, N] int8
    offsets: Tensor | None  # [G, N]
    bias: Tensor | None  # [N]

    @property
    def padded(self) -> int:
        """Columns with those that fill the last pair of halves."""
        return self.codes.shape[1] * (2 if self.kind == "nibbles" else 1)

    @property
    def num_outputs(self) -> int:
        return len(self.codes)


def stored_bits(kind: StoredKind, group_size: int, columns: int, beside: float | None = None) -> float | None:
    """Return a value's bits like `KernelSet.stored_bits`. Scales and offsets with units become floats of 32 bits."""
    if not _has_groups(group_size, columns):
        return None
    bits, usual = _BITS[kind]
    kept = usual if beside is None else beside if beside in _PLAIN else 2 * max(_PLAIN)
    return bits + kept / min(group_size, columns)


def pack_stored(matrices: Sequence[Sequence[StoredMatrix]], bias: Tensor | None) -> StoredLinear | None:
    """Pack like `KernelSet.pack_stored`; None: groups are narrower than 32 columns, or no one form fits all rows."""
    whole = joined([rows for matrix in matrices for rows in matrix])
    if whole is None or not _has_groups(whole.group_size, whole.shape[1]):
        return None
    (whole,) = without_equal_zero_points([with_floats(whole)])
    base, table = _values(whole.table)
    exact = table is None or torch.equal(table.bfloat16().half().float(), table)
    if not exact or (whole.zero_points is not None and (table is not None or whole.kind == "e4m3")):
        return None
    group, columns = whole.group_size, whole.shape[1]
    half = _WIDE_HALF if group >= columns or group % _WIDE_HALF == 0 else _LEAST_GROUP
    padded = -(-columns // (2 * half)) * 2 * half
    codes = torch.nn.functional.pad(whole.codes, (0, padded - columns))
    if whole.kind == "nibbles":
        low, high = codes.view(len(codes), -1, 2, half).unbind(2)
        codes = (low | high << 4).flatten(1)
    return StoredLinear(
        kind="bytes" if whole.kind == "six_bits" else whole.kind,
        columns=columns,
        half=half,
        group=padded if group >= columns else group,
        base=base,
        table=None if table is None else table.to(codes.device),
        codes=codes.contiguous(),
        scales=_by_group(narrowest([whole.scales])[0]),
        zero_points=None if whole.zero_points is None else _by_group(whole.zero_points),
        offsets=None if whole.offsets is None else _by_group(narrowest([whole.offsets])[0]),
        bias=bias,
    )


def _has_groups(group_size: int, columns: int) -> bool:
    return group_size >= columns or group_size % _LEAST_GROUP == 0


def _values(table: tuple[float, ...]) -> tuple[int, Tensor | None]:
    """The value of code 0 where each code's is one more, or else the table."""
    if not table:
        return 0, None
    first = table[0]
    if first == int(first) and abs(first) <= _MOST_BASE and all(table[code] == first + code for code in range(16)):
        return int(first), None
    return 0, torch.tensor(table)


def _by_group(numbers: Tensor) -> Tensor:
    return numbers.T.contiguous()


@triton.jit
def _decoded(  # noqa: PLR0917
    codes, points, base, table, KIND: tl.constexpr, POINTS: tl.constexpr, TABLE: tl.constexpr, dtype: tl.constexpr
):
    """Codes [columns, HALF] less their zero points, in the type of the rows; of e4m3 a 256th of the value."""
    if KIND == "e4m3":
        return decode_e4m3(codes).to(dtype)
    if TABLE:
        return tl.load(table + codes.to(tl.int32)).to(dtype)
    whole = codes.to(tl.int8, bitcast=True).to(tl.int16)
    if KIND == "nibbles":
        whole = whole + base
    if POINTS:
        whole = whole - points.to(tl.int16)[:, None]
    return whole.to(tl.float32).to(dtype)


@triton.jit
def _of_group(numbers, columns, group, num_columns, num_groups):
    """Scales, offsets or zero points of columns; zeros behind the last group, where rows are zeros too."""
    inside = (columns < num_columns) & (group < num_groups)
    return tl.load(numbers + group * num_columns + columns, mask=inside, other=0)


@triton.jit
def stored_product_kernel(  # noqa: PLR0917
    x, codes, scales, points, offsets, bias, residual, out,
    num_rows, num_columns, depth, padded, num_groups, scale, base, table,
    KIND: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    POINTS: tl.constexpr, OFFSETS: tl.constexpr, TABLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply like `product_kernel`, with decoded weights. SPLIT: a pair's halves may have scales of their own."""
    dtype: tl.constexpr = x.dtype.element_ty
    unit: tl.constexpr = _DECODED if KIND == "e4m3" else 1.0
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_tiles = row_tiles * tl.cdiv(num_columns, BLOCK_N)
    half = tl.arange(0, HALF)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        rows = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_inside, column_inside = (rows < num_rows)[:, None], (columns < num_columns)[:, None]
        of_rows = x + rows.to(tl.int64)[:, None] * depth
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, padded, 2 * HALF, num_stages=STAGES):
            ks = k + half
            first = tl.load(of_rows + ks[None, :], mask=row_inside & (ks < depth)[None, :], other=0.0)
            second = tl.load(of_rows + HALF + ks[None, :], mask=row_inside & (ks + HALF < depth)[None, :], other=0.0)
            if KIND == "nibbles":
                place = codes + columns.to(tl.int64)[:, None] * (padded // 2) + (k // 2 + half)[None, :]
                both = tl.load(place, mask=column_inside, other=0)
                low, high = both & 15, both >> 4
            else:
                place = codes + columns.to(tl.int64)[:, None] * padded + ks[None, :]
                low = tl.load(place, mask=column_inside, other=0)
                high = tl.load(place + HALF, mask=column_inside, other=0)

            group = k // GROUP
            factor = _of_group(scales, columns, group, num_columns, num_groups).to(tl.float32) * unit
            point = _of_group(points, columns, group, num_columns, num_groups) if POINTS else 0
            part = tl.dot(first, tl.trans(_decoded(low, point, base, table, KIND, POINTS, TABLE, dtype)))
            if OFFSETS:
                offset = _of_group(offsets, columns, group, num_columns, num_groups).to(tl.float32)
                total = tl.fma(tl.sum(first.to(tl.float32), 1)[:, None], offset[None, :], total)
            if SPLIT:
                total = tl.fma(part, factor[None, :], total)
                group = (k + HALF) // GROUP
                factor = _of_group(scales, columns, group, num_columns, num_groups).to(tl.float32) * unit
                point = _of_group(points, columns, group, num_columns, num_groups) if POINTS else 0
                part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                if OFFSETS:
                    offset = _of_group(offsets, columns, group, num_columns, num_groups).to(tl.float32)
            part = tl.dot(second, tl.trans(_decoded(high, point, base, table, KIND, POINTS, TABLE, dtype)), part)
            total = tl.fma(part, factor[None, :], total)
            if OFFSETS:
                total = tl.fma(tl.sum(second.to(tl.float32), 1)[:, None], offset[None, :], total)
        store_tile(
            total, bias, residual, out, rows, columns, num_rows, num_columns, scale, dtype, HAS_BIAS, HAS_RESIDUAL
        )


class StoredProduct:
    """Products with such matrices, as `TorchProduct` has them. `same_tiles`: one order of sums for each weight."""

    def __init__(self, *, same_tiles: bool) -> None:
        self._same_tiles = same_tiles

    def linear(self, x: Tensor, w: StoredLinear) -> Tensor:
        """x [T, K] -> [T, N]."""
        return self._product(x, w, None, x.new_empty(x.shape[0], w.num_outputs))

    def linear_add(self, x: Tensor, w: StoredLinear, residual: Tensor, scale: float = 1.0) -> Tensor:
        """residual [T, N] += scale * the projection of x."""
        return self._product(x, w, residual, residual, scale)

    def logits(self, x: Tensor, w: StoredLinear) -> Tensor:
        """x [S, K] -> [S, V] float32, rounded to x's dtype first."""
        return self._product(x, w, None, torch.empty(x.shape[0], w.num_outputs, dtype=torch.float32, device=x.device))

    def _product(self, x: Tensor, w: StoredLinear, residual: Tensor | None, out: Tensor, scale: float = 1.0) -> Tensor:
        num_rows, num_columns = x.shape[0], w.num_outputs
        if x.shape[1] != w.columns or out.shape != (num_rows, num_columns):
            raise ValueError(f"rows of {x.shape[1]} do not fit {[num_columns, w.columns]} and {list(out.shape)}")
        if not out.is_contiguous():
            raise ValueError("results must be contiguous")
        if num_rows:
            few = num_rows <= _FEW_ROWS and not self._same_tiles
            block_m = _FEW_ROWS if few else _ROWS
            tiles = triton.cdiv(num_rows, block_m) * triton.cdiv(num_columns, _COLUMNS)
            stored_product_kernel[(min(tiles, num_programs(x.device)),)](
                x.contiguous(), w.codes, w.scales, w.zero_points, w.offsets, w.bias, residual, out,
                num_rows, num_columns, w.columns, w.padded, len(w.scales), float(scale), w.base, w.table,
                KIND=w.kind, HALF=w.half, GROUP=w.group, SPLIT=w.group % (2 * w.half) != 0,
                POINTS=w.zero_points is not None, OFFSETS=w.offsets is not None, TABLE=w.table is not None,
                HAS_BIAS=w.bias is not None, HAS_RESIDUAL=residual is not None,
                BLOCK_M=block_m, BLOCK_N=_COLUMNS, STAGES=3, num_warps=4, maxnreg=_MOST_REGISTERS,
            )  # fmt: skip
        return out
