"""Products with adapters, in plain torch: the specification of `AdaptedOps`.

Promises: a row without an adapter has the bits of the plain op; on a CPU another row's bits do not depend on the rest
of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.activations import Activation, gated
from quire_kernels.kernel_set import (
    AdaptedOps,
    Addend,
    ExpertMatrices,
    Norm,
    Routing,
)
from quire_kernels.low_rank import LowRankExperts, LowRankMatrix
from quire_kernels.reference import experts as of_experts
from quire_kernels.reference import linear
from quire_kernels.reference.linear import Linear, by_tiles, normed


class DenseLowRank(NamedTuple):
    """All parts as one matrix, in float32."""

    shrink: Tensor  # [R, K], with the scales
    expand: Tensor  # [N, R], zero where a row is not of a rank's part


def pack(matrix: LowRankMatrix) -> DenseLowRank:
    ranks = sum(len(part.shrink) for part in matrix.parts)
    expand = torch.zeros(matrix.num_rows, ranks)
    at = 0
    for part in matrix.parts:
        rows, rank = part.expand.shape
        expand[part.first_row : part.first_row + rows, at : at + rank] = part.expand
        at += rank
    # A product with A alone, times the scale, is the same up to rounding.
    return DenseLowRank(torch.cat([part.shrink.float() * part.scale for part in matrix.parts]), expand)


def pack_experts(experts: LowRankExperts) -> tuple[DenseLowRank, ...]:
    return tuple([pack(experts.of(expert)) for expert in range(experts.count)])


def num_bytes(low_rank: DenseLowRank | tuple[DenseLowRank, ...]) -> int:
    if not isinstance(low_rank, DenseLowRank):
        return sum(map(num_bytes, low_rank))
    return low_rank.shrink.nbytes + low_rank.expand.nbytes


def norm_linear(x: Tensor, norm: Norm | None, w: Linear, addend: Addend) -> Tensor:
    def compute(rows: Tensor, added: DenseLowRank) -> Tensor:
        return _sums(normed(rows, norm), w, added).to(rows.dtype)

    return _with_adapted(linear.norm_linear(x, norm, w), x, addend, compute)


def norm_gate_up(x: Tensor, norm: Norm | None, w: Linear, activation: Activation, addend: Addend) -> Tensor:
    def compute(rows: Tensor, added: DenseLowRank) -> Tensor:
        gate, up = _sums(normed(rows, norm), w, added).chunk(2, dim=-1)
        return gated(gate, up, activation).to(rows.dtype)

    return _with_adapted(linear.norm_gate_up(x, norm, w, activation), x, addend, compute)


def linear_add(x: Tensor, w: Linear, residual: Tensor, scale: float, addend: Addend) -> Tensor:
    def compute(rows: Tensor, added: DenseLowRank) -> Tensor:
        return _sums(rows, w, added).to(rows.dtype)

    projected = _with_adapted(linear.linear(x, w, wide=False), x, addend, compute)
    return residual.add_(projected if scale == 1.0 else projected * scale)


def mix_experts(  # noqa: PLR0917 - the op's contract
    x: Tensor,
    norm: Norm | None,
    routing: Routing,
    experts: ExpertMatrices,
    scale: float,
    residual: Tensor | None,
    above: Addend | None,
    below: Addend | None,
) -> Tensor:
    (some,) = {id(each.slots): each.slots for each in (above, below) if each is not None}.values()

    def compute(rows: Tensor, chosen: Tensor, expert: int, experts: ExpertMatrices) -> Tensor:
        """The plain results; those of rows that have an adapter are computed anew, by adapter."""
        found, slots = of_experts.expert_rows_of(rows, chosen, expert, experts), some[chosen]
        for slot in range(max(len(each.matrices) for each in (above, below) if each is not None)):
            to_pair, to_down = (None if each is None else each.matrices[slot] for each in (above, below))
            mine = (slots == slot).nonzero().flatten()
            if len(mine) and (to_pair is not None or to_down is not None):
                found[mine] = by_tiles(
                    lambda tile: _adapted_expert(
                        tile,
                        expert,
                        experts,
                        None if to_pair is None else to_pair[expert],  # noqa: B023
                        None if to_down is None else to_down[expert],  # noqa: B023
                    ),
                    rows[chosen[mine]],
                )
        return found

    return of_experts.mix_with(compute, x, norm, routing, experts, scale, residual)


def _adapted_expert(
    rows: Tensor, expert: int, experts: ExpertMatrices, above: DenseLowRank | None, below: DenseLowRank | None
) -> Tensor:
    """An expert's results [R, H] with what an adapter adds to gate and up, and to down."""
    gate, up, down = of_experts.matrices_of(expert, experts)
    bias = None if gate.bias is None or up.bias is None else torch.cat([gate.bias, up.bias])
    pair = Linear(torch.cat([gate.weight, up.weight]), bias)
    gates, ups = _sums(rows, pair, above).chunk(2, dim=-1)
    inner = gated(gates, ups, experts.activation).to(rows.dtype)
    return _sums(inner, down, below).to(rows.dtype)


def _sums(rows: Tensor, w: Linear, added: DenseLowRank | None) -> Tensor:
    """[R, N] float32: the projection with its bias, and what is added to it."""
    wide = Linear(w.weight.float(), None if w.bias is None else w.bias.float())
    if added is None:
        return linear.project(rows.float(), wide)
    shrunk = linear.project(rows.float(), Linear(added.shrink, None))
    return linear.project(rows.float(), wide) + linear.project(shrunk, Linear(added.expand, None))


def _with_adapted(
    plain: Tensor, x: Tensor, addend: Addend, compute: Callable[[Tensor, DenseLowRank], Tensor]
) -> Tensor:
    """The plain op's rows; those that have an adapter are computed anew, by adapter."""
    for slot, added in enumerate(addend.matrices):
        if added is None:
            continue
        rows = (addend.slots == slot).nonzero().flatten()
        if len(rows):
            plain[rows] = by_tiles(lambda tile: compute(tile, added), x[rows])  # noqa: B023 - called at once
    return plain


ADAPTED = AdaptedOps(
    pack=pack,
    bind=tuple,
    num_bytes=num_bytes,
    itemsize=3 * 4,  # of three parts two have zeros in each row
    norm_linear=norm_linear,
    norm_gate_up=norm_gate_up,
    linear_add=linear_add,
    pack_experts=pack_experts,
    mix_experts=mix_experts,
)
