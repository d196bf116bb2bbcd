"""How far a right result may be from the exact one, derived from the types that numbers pass through.

Owns the arithmetic of errors; nothing in it is fitted to what some kernels happen to give. Must not know: devices.

A rounding to a type with relative precision u changes a number x by an amount within u |x| that is as good as
independent from one number to the next. Of a sum of such changes, each within a range r, Hoeffding's inequality says
that it exceeds sqrt(ln(2 / P) / 2 * sum r^2) with probability P at most; P is 1e-12 a number. A sum in float32 of n
terms, in any order and even if every step is truncated, is off by n * 2^-23 of the sum of magnitudes at most; that
worst case is counted twice, since `reference` sums in float32 as well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHANCE = 1e-12
HOEFFDING = math.sqrt(math.log(2 / CHANCE) / 2)
FLOAT32_STEP = 2.0**-23


def precision(dtype: torch.dtype) -> float:
    """u: a number of this type is within u of what was rounded to it, relatively."""
    return torch.finfo(dtype).eps / 2


def rounded(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The bound of one rounding of numbers of such magnitudes; that of the least numbers is absolute."""
    kind = torch.finfo(dtype)
    return magnitude.abs() * precision(dtype) + kind.tiny * kind.eps


def independent(sum_of_squared_ranges: Tensor, worst: Tensor | None = None) -> Tensor:
    """Hoeffding's bound, or the worst case where that is less: half the sum of the ranges."""
    bound = HOEFFDING * sum_of_squared_ranges.clamp(min=0).sqrt()
    return bound if worst is None else torch.minimum(bound, worst)


def float32_sum(num_terms: int, magnitudes: Tensor) -> Tensor:
    """`magnitudes`: the sum of the terms' absolute values."""
    return 2 * num_terms * FLOAT32_STEP * magnitudes


def product(rows: Tensor, weight: Tensor, dtype: torch.dtype, *, roundings: int, step: Tensor | None = None) -> Tensor:
    """The bound of rows [M, K] @ weight [N, K].T before the result is rounded: [M, N].

    `roundings`: of each term. `step`: [M, 1], the distance between the numbers that a row is rounded to where rows are
    held in eight bits.
    """
    rows, weight = rows.double(), weight.double()
    magnitudes, relative = rows.abs() @ weight.abs().T, roundings * precision(dtype)
    bound = independent((2 * relative) ** 2 * (rows.square() @ weight.square().T), relative * magnitudes)
    if step is not None:
        bound = bound + independent(step.double().square() * weight.square().sum(dim=1))
    return bound + float32_sum(rows.shape[1] + 4, magnitudes)
