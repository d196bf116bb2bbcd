"""Embedding, RMSNorm and projections.

Promises: on a CPU a row's result does not depend on the number, the content or the order of the other rows, nor on the
number of threads. Must not know: sequences.

A matrix product of a varying number of rows is not row-invariant in torch: the library picks another algorithm, with
another order of summation, for another shape. So on a CPU every product is computed in tiles of exactly `TILE` rows,
the last one padded: one shape, one order. Within that shape a row's place and its neighbours have no influence (checked
bitwise by tests/kernels).

Nor is a product of one shape the same for any number of threads, because libraries divide it. Where they cut the
columns, a thread that is left with less than a vector of them sums these in another order: MKL's float32 does so even
for sums of 16 terms, so no size is small enough to be safe. Where columns are few they may cut the sums themselves, as
oneDNN's rules for AMX allow from 256 terms on. Only what one thread computes is never divided. So the columns are cut
here, into shares that do not depend on the threads, and each share is computed by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.activations import Activation, gated
from quire_kernels.kernel_set import Norm
from quire_kernels.stored import StoredMatrix

# Decode batches are small, so a small tile; at 16 rows a product costs about as much as at one.
TILE = 16
# Columns per share. Small matrices are one share, which costs nothing; large ones keep many threads busy.
SHARE = 512


class Linear(NamedTuple):
    """A projection x @ weight.T + bias."""

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    of: int = 0  # rows of the matrix of which these are some; 0: they are all


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    return Linear(weight.contiguous(), bias)


def pack_gate_up(gate: Tensor, up: Tensor, bias: Tensor | None) -> Linear:
    """One matrix [2 I, K]: the gate's rows, then up's."""
    return Linear(torch.cat([gate, up]), bias)


def pack_stored(matrices: Sequence[Sequence[StoredMatrix]], bias: Tensor | None) -> Linear:
    """The numbers of one matrix, or the gate's and then up's, in float32 whatever the type of the rows."""
    numbers = torch.cat([rows.dequantised() for matrix in matrices for rows in matrix])
    return Linear(numbers, None if bias is None else bias.float())


def embed(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids]


def norm_linear(x: Tensor, norm: Norm | None, w: Linear) -> Tensor:
    return by_tiles(lambda rows: project(normed(rows, norm), w), x)


def norm_gate_up(x: Tensor, norm: Norm | None, w: Linear, activation: Activation) -> Tensor:
    def compute(rows: Tensor) -> Tensor:
        gate, up = project(normed(rows, norm), w).float().chunk(2, dim=-1)  # [R, I] each
        return gated(gate, up, activation).to(x.dtype)

    return by_tiles(compute, x)


def linear_add(x: Tensor, w: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
    projected = by_tiles(lambda rows: project(rows, w), x)
    # Multiplied by itself: with `alpha` torch rounds the last elements of an array differently.
    return residual.add_(projected if scale == 1.0 else projected * scale)


def norm_add(y: Tensor, norm: Norm, residual: Tensor, scale: float = 1.0) -> Tensor:
    added = by_tiles(lambda rows: normed(rows, norm), y)
    if scale == 1.0:
        return residual.add_(added)
    return residual.copy_(residual.float().add_(added).mul_(scale))


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    # By its definition: torch.sigmoid rounds the last elements of an array differently.
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) / (1.0 + torch.exp(-gate.to(wide)))).to(x.dtype)


def linear(x: Tensor, w: Linear, wide: bool) -> Tensor:
    out = norm_linear(x, None, w)
    return out.float() if wide else out


def logits(x: Tensor, norm: Norm, w: Linear) -> Tensor:
    return norm_linear(x, norm, w).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32, returned in x's dtype.

    Rounded before the multiplication too, unless the weight is wider than x: see `Norm`.
    """
    wide = x.float()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return (weight * (wide / torch.sqrt(mean_square + eps)).to(weight.dtype)).to(x.dtype)


def normed(rows: Tensor, norm: Norm | None) -> Tensor:
    """rows [R, K] as `Norm` says, in their dtype."""
    if norm is None:
        return rows
    if not norm.centred:
        return rms_norm(rows, norm.weight, norm.eps)
    wide = rows.float()
    return rms_norm(wide - wide.mean(dim=-1, keepdim=True), norm.weight.float(), norm.eps).to(rows.dtype)


def project(rows: Tensor, w: Linear) -> Tensor:
    """rows [R, K] @ weight.T + bias: [R, N]; on a CPU in shares of columns, each computed by one thread."""
    if rows.dtype is not w.weight.dtype:
        return project(rows.to(w.weight.dtype), w).to(rows.dtype)
    columns = w.weight.shape[0]
    threads = torch.get_num_threads()
    if rows.device.type != "cpu" or (threads == 1 and columns <= SHARE):
        return F.linear(rows, w.weight, w.bias)

    def share(start: int) -> Tensor:
        part = slice(start, start + SHARE)
        return F.linear(rows, w.weight[part], None if w.bias is None else w.bias[part])

    starts = range(0, columns, SHARE)
    if threads == 1:
        return torch.cat([share(start) for start in starts], dim=1)
    torch.set_num_threads(1)
    try:
        compute = map if columns <= SHARE else _workers(threads).map
        return torch.cat(list(compute(share, starts)), dim=1)
    finally:
        torch.set_num_threads(threads)


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    """Threads whose products are not divided further: torch's number of threads is set per thread."""
    return ThreadPoolExecutor(threads, "reference", initializer=torch.set_num_threads, initargs=(1,))


def by_tiles(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """compute(x) for an x of any number of rows, called with exactly TILE rows at a time on a CPU."""
    num_rows = x.shape[0]
    if x.device.type != "cpu" or num_rows == TILE:
        return compute(x)
    results = []
    for start in range(0, num_rows, TILE):
        rows = x[start : start + TILE]
        if len(rows) < TILE:
            padded = x.new_zeros(TILE, x.shape[1])
            padded[: len(rows)] = rows
            results.append(compute(padded)[: len(rows)])
        else:
            results.append(compute(rows))
    return torch.cat(results) if len(results) > 1 else results[0]
