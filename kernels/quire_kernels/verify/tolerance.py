"""Error bounds of correct results, derived from the precision of the types involved.

Owns the arithmetic of errors; no constant is fitted to measured errors of kernels. Must not know: devices.

Rounding to a type with relative precision u changes a number x by at most u |x|; the changes of different numbers are
treated as independent. By Hoeffding's inequality the sum of such changes, each within a range r, exceeds sqrt(ln(2 / P)
/ 2 * sum r^2) with probability P at most; P is 1e-12 for each number. A float32 sum of n terms, in any order and even
if every step truncates, has an error of at most n * 2^-23 times the sum of magnitudes; this worst case counts twice,
since `reference` sums in float32 as well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHANCE = 1e-12
HOEFFDING = math.sqrt(math.log(2 / CHANCE) / 2)
FLOAT32_STEP = 2.0**-23


def precision(dtype: torch.dtype) -> float:
    """u: the maximum relative error of rounding to this type."""
    return torch.finfo(dtype).eps / 2


def rounded(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The bound of one rounding of numbers of these magnitudes; for subnormal numbers it is absolute."""
    kind = torch.finfo(dtype)
    return magnitude.abs() * precision(dtype) + kind.tiny * kind.eps


def independent(sum_of_squared_ranges: Tensor, worst: Tensor | None = None) -> Tensor:
    """Hoeffding's bound, or the worst case if that is smaller: half the sum of the ranges."""
    bound = HOEFFDING * sum_of_squared_ranges.clamp(min=0).sqrt()
    return bound if worst is None else torch.minimum(bound, worst)


def float32_sum(num_terms: int, magnitudes: Tensor) -> Tensor:
    """The bound of a float32 sum. `magnitudes`: the sum of the terms' absolute values."""
    return 2 * num_terms * FLOAT32_STEP * magnitudes


def product(rows: Tensor, weight: Tensor, dtype: torch.dtype, *, roundings: int, step: Tensor | None = None) -> Tensor:
    """The bound of rows [M, K] @ weight [N, K].T before the result is rounded: [M, N].

    `roundings`: roundings of each term. `step`: [M, 1], the quantization step of rows that are quantized to eight bits.
    """
    rows, weight = rows.double(), weight.double()
    magnitudes, relative = rows.abs() @ weight.abs().T, roundings * precision(dtype)
    bound = independent((2 * relative) ** 2 * (rows.square() @ weight.square().T), relative * magnitudes)
    if step is not None:
        bound = bound + independent(step.double().square() * weight.square().sum(dim=1))
    return bound + float32_sum(rows.shape[1] + 4, magnitudes)
