"""Projections by torch (cuBLASLt on a GPU), or by a persistent Triton kernel with batch-invariant results.

Promises: `TiledProduct` sums every output element in one order over k, for any number of rows: a row alone has the same
bits as in a batch. A column has the same bits among all columns of its matrix and among a rank's own.

Every element of a tile is the sum over k in steps of BLOCK_K, added to one float32 accumulator by the matrix
instruction. BLOCK_N and BLOCK_K depend on the weight only; BLOCK_M is 64 rows a warpgroup, one warpgroup for few rows
and two for many, so a warp issues the same instruction on the same operands in either: m64 n(BLOCK_N) k16 (wgmma) on
sm_90, m16n8k16 (mma.sync) on sm_80. A 16-row tile would read no less memory when decoding and would be mma.sync on
sm_90, which need not add the 16 products of a step in wgmma's order: never mix the two. On sm_100 (tcgen05) 64 and 128
rows are two shapes of one instruction; their equality has not been tested on such a GPU.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.activations import Activation
from quire_kernels.reference.linear import Linear
from quire_kernels.triton.activation import activated

_FEW_ROWS = 64
_BLOCK_K = 64
_SIMULATED_PROGRAMS = 3  # number of programs without a GPU; few, so that a program has several tiles


@triton.jit
def store_tile(  # noqa: PLR0917
    total, bias, residual, out, rows, columns, num_rows, num_columns, scale,
    dtype: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The sums of a tile (+ bias [N]) (* scale + residual [M, N]), rounded to `dtype` as in the reference, into out."""
    row_inside, column_inside = rows < num_rows, columns < num_columns
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    value = total.to(dtype)
    at = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    if HAS_RESIDUAL:
        before = tl.load(residual + at, mask=inside, other=0.0)
        value = (before.to(tl.float32) + scale * value.to(tl.float32)).to(dtype)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def product_kernel(  # noqa: PLR0917
    x, weight, bias, residual, out, num_rows, num_columns, depth, scale,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ weight [N, K].T (+ bias [N]) (* scale + residual [M, N]), rounded as in the reference."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_tiles = row_tiles * tl.cdiv(num_columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # Programs that run at the same time share columns, so that a weight is read from memory once.
        rows = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_inside, column_inside = rows < num_rows, columns < num_columns
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            ks = k + tl.arange(0, BLOCK_K)
            a = tl.load(
                x + rows.to(tl.int64)[:, None] * depth + ks[None, :],
                mask=row_inside[:, None] & (ks < depth)[None, :],
                other=0.0,
            )
            b = tl.load(
                weight + columns.to(tl.int64)[:, None] * depth + ks[None, :],
                mask=column_inside[:, None] & (ks < depth)[None, :],
                other=0.0,
            )
            total = tl.dot(a, tl.trans(b), total)
        store_tile(
            total, bias, residual, out, rows, columns, num_rows, num_columns, scale,
            x.dtype.element_ty, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def gated_product_kernel(  # noqa: PLR0917
    x, weight, bias, out, num_rows, num_columns, depth,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [M, N] = activation(gate) * up of both halves of x [M, K] @ weight [2 N, K].T (+ bias [2 N]).

    Each half is rounded before the activation, as the reference does.
    """
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    dtype: tl.constexpr = x.dtype.element_ty
    for tile in tl.range(tl.program_id(0), row_tiles * tl.cdiv(num_columns, BLOCK_N), tl.num_programs(0)):
        rows = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_inside, column_inside = rows < num_rows, columns < num_columns
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            ks = k + tl.arange(0, BLOCK_K)
            a = tl.load(
                x + rows.to(tl.int64)[:, None] * depth + ks[None, :],
                mask=row_inside[:, None] & (ks < depth)[None, :],
                other=0.0,
            )
            at = weight + columns.to(tl.int64)[:, None] * depth + ks[None, :]
            inside = column_inside[:, None] & (ks < depth)[None, :]
            low = tl.load(at, mask=inside, other=0.0)
            high = tl.load(at + num_columns.to(tl.int64) * depth, mask=inside, other=0.0)
            gate, up = tl.dot(a, tl.trans(low), gate), tl.dot(a, tl.trans(high), up)
        if HAS_BIAS:
            gate += tl.load(bias + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + num_columns + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        value = activated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
        place = out + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(place, value.to(dtype), mask=row_inside[:, None] & column_inside[None, :])


class TorchProduct:
    """Products by torch's libraries: fastest, but the order of summation may depend on the number of rows."""

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        """x [T, K] -> [T, N]."""
        return F.linear(x, w.weight, w.bias)

    def linear_add(self, x: Tensor, w: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        """residual [T, N] += scale * the projection of x; without a bias the product's own launch adds it."""
        if w.bias is not None:
            return residual.add_(F.linear(x, w.weight, w.bias), alpha=scale)
        return residual.addmm_(x, w.weight.t(), alpha=scale)

    def logits(self, x: Tensor, w: Linear) -> Tensor:
        """x [S, K] -> [S, V] float32, rounded to x's dtype first."""
        return F.linear(x, w.weight, w.bias).float()


class TiledProduct:
    """Products with one order of summation for each weight."""

    def gate_up(self, x: Tensor, w: Linear, activation: Activation) -> Tensor:
        """x [T, K], w [2 I, K] -> activation(gate) * up [T, I], in one launch."""
        (num_rows, depth), width = x.shape, w.weight.shape[0] // 2
        _require(x, w, 2 * width)
        out = x.new_empty(num_rows, width)
        if num_rows:
            few = num_rows <= _FEW_ROWS
            block_m, block_n = (64 if few else 128), min(64, columns_of_a_tile(w.of // 2 or width))
            tiles = triton.cdiv(num_rows, block_m) * triton.cdiv(width, block_n)
            gated_product_kernel[(min(tiles, num_programs(x.device)),)](
                x.contiguous(), w.weight, w.weight if w.bias is None else w.bias, out, num_rows, width, depth,
                ACTIVATION=activation, HAS_BIAS=w.bias is not None,
                BLOCK_M=block_m, BLOCK_N=block_n, STAGES=3, num_warps=4 if few else 8, BLOCK_K=_BLOCK_K
            )  # fmt: skip
        return out

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        """x [T, K] -> [T, N]."""
        return _product(x, w, None, x.new_empty(x.shape[0], w.weight.shape[0]))

    def linear_add(self, x: Tensor, w: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        """residual [T, N] += scale * the projection of x. Every element is read and written by one thread."""
        return _product(x, w, residual, residual, scale)

    def logits(self, x: Tensor, w: Linear) -> Tensor:
        """x [S, K] -> [S, V] float32, rounded to x's dtype first."""
        return _product(x, w, None, torch.empty(x.shape[0], w.weight.shape[0], dtype=torch.float32, device=x.device))


def _product(x: Tensor, w: Linear, residual: Tensor | None, out: Tensor, scale: float = 1.0) -> Tensor:
    (num_rows, depth), num_columns = x.shape, w.weight.shape[0]
    _require(x, w, num_columns)
    if out.shape != (num_rows, num_columns):
        raise ValueError(f"{list(x.shape)} rows of {num_columns} results do not fit {list(out.shape)}")
    if not out.is_contiguous():
        raise ValueError("results must be contiguous")
    if num_rows:
        few = num_rows <= _FEW_ROWS
        block_m, block_n = (64 if few else 128), columns_of_a_tile(w.of or num_columns)
        stages = 4 if block_m + block_n <= 192 else 3  # 96 KiB of shared memory, available on every GPU since Ampere
        tiles = triton.cdiv(num_rows, block_m) * triton.cdiv(num_columns, block_n)
        product_kernel[(min(tiles, num_programs(x.device)),)](
            x.contiguous(), w.weight, w.weight if w.bias is None else w.bias, out if residual is None else residual,
            out, num_rows, num_columns, depth, float(scale),
            HAS_BIAS=w.bias is not None, HAS_RESIDUAL=residual is not None,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=_BLOCK_K, STAGES=stages,
            num_warps=4 if few else 8,
        )  # fmt: skip
    return out


def _require(x: Tensor, w: Linear, num_columns: int) -> None:
    if w.weight.shape != (num_columns, x.shape[1]) or w.weight.dtype != x.dtype:
        raise ValueError(f"{x.dtype} rows of {x.shape[1]} do not fit {w.weight.dtype} {list(w.weight.shape)}")
    if not w.weight.is_contiguous():
        raise ValueError("weights must be contiguous")


def columns_of_a_tile(num_columns: int) -> int:
    """Wide tiles if every multiprocessor gets one. The width depends on the weight alone, of whose columns a rank may
    have some: it affects the bits."""
    return 128 if num_columns >= 16384 else 64 if num_columns >= 4096 else 32


@cache
def num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _SIMULATED_PROGRAMS
    return (
        2 * torch.cuda.get_device_properties(device).multi_processor_count
    )  # the number that fits into their shared memory
