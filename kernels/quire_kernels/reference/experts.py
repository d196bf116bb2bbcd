"""Mixtures of experts: the choice of each row's experts, their products, and the weighted sum.

Promises: on a CPU a row's result does not depend on the other rows. Must not know: sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.activations import gated
from quire_kernels.kernel_set import ExpertMatrices, Norm, Routing, expert_rows
from quire_kernels.reference.linear import Linear, by_tiles, normed, project

# An expert's results for the rows [R] of rows [T, H] that chose it: (rows, chosen, expert, experts) -> [R, H].
Compute: TypeAlias = Callable[[Tensor, Tensor, int, ExpertMatrices], Tensor]

_COLUMNS = 16  # MKL's product of fewer columns, over terms that fill no vector, depends on a row's place in its tile


def mix_experts(  # noqa: PLR0917 - the op's contract
    x: Tensor, norm: Norm | None, routing: Routing, experts: ExpertMatrices, scale: float, residual: Tensor | None
) -> Tensor:
    return mix_with(expert_rows_of, x, norm, routing, experts, scale, residual)


def mix_with(  # noqa: PLR0917 - the op's contract
    compute: Compute,
    x: Tensor,
    norm: Norm | None,
    routing: Routing,
    experts: ExpertMatrices,
    scale: float,
    residual: Tensor | None,
) -> Tensor:
    """`mix_experts`, with `compute` in place of an expert's own computation."""
    rows = by_tiles(lambda some: normed(some, norm), x) if len(x) else x
    _, index, weights = _routed(rows if routing.norm is None else x, routing)
    total = _weighted(rows, index, weights, experts, compute)
    if residual is None:
        return total.to(x.dtype)
    return residual.copy_((residual.to(total.dtype) + total * scale).to(x.dtype))


def given_experts(x: Tensor, index: Tensor, weights: Tensor, experts: ExpertMatrices) -> Tensor:
    return _weighted(x, index, weights, experts, expert_rows_of).to(x.dtype)


def route(x: Tensor, routing: Routing, count: int) -> tuple[Tensor, Tensor, Tensor]:
    routing.check(count)
    return _routed(x, routing)


def _routed(rows: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, chosen experts and weights."""
    if routing.norm is not None and len(rows):
        rows = by_tiles(lambda some: normed(some, routing.norm), rows)
    logits = router_logits(rows, routing.weight)
    return logits, *choose(logits, routing)


def gate_rows(x: Tensor, norm: Norm | None, w: Linear, wide: Tensor) -> Tensor:
    if not len(x):
        return wide
    logits = router_logits(by_tiles(lambda some: normed(some, norm), x), w)
    gates = torch.cat([_sigmoid(row[None]) for row in logits])  # torch rounds the last elements of an array differently
    return (_wide(wide) * gates).to(wide.dtype)


def router_logits(rows: Tensor, w: Linear) -> Tensor:
    """[T, E], float32 or wider: products of wide numbers, since no rounding may decide between two experts."""
    weight, bias = _wide(w.weight), None if w.bias is None else _wide(w.bias)
    if not len(rows):
        return weight.new_zeros(0, len(weight))
    count = len(weight)
    lacking = -count % _COLUMNS
    wide = Linear(F.pad(weight, (0, 0, 0, lacking)), None if bias is None else F.pad(bias, (0, lacking)))
    return by_tiles(lambda some: project(_wide(some), wide)[:, :count], rows)


def choose(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose for logits [T, E] the experts [T, k], best first, and their weights."""
    scores = _scores(logits, routing)
    if logits.device.type == "cpu" and len(logits) > 1:  # torch rounds the last elements of an array differently
        scores = torch.cat([_scores(row[None], routing) for row in logits])
    decisive = scores if routing.selection_bias is None else scores + routing.selection_bias.to(scores)
    if routing.groups > 1:
        decisive = _within_groups(decisive, routing)
    elif routing.selection_bias is None:
        decisive = logits
    index = torch.sort(decisive, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, index)
    if routing.normalised:
        total = weights[:, :1]
        for rank in range(1, routing.top_k):
            total = total + weights[:, rank : rank + 1]
        weights = weights / (total.clamp(min=routing.least_sum) + routing.epsilon)
    weights = weights * routing.scale
    if routing.expert_scales is not None:
        weights = weights * routing.expert_scales.to(weights)[index]
    return index, weights


def _within_groups(values: Tensor, routing: Routing) -> Tensor:
    """values [T, E], less than any other where an expert's group is not kept."""
    grouped = values.view(len(values), routing.groups, -1)
    best = grouped.sort(dim=-1, descending=True).values[..., : routing.best_of_group]
    total = best[..., 0] if routing.best_of_group == 1 else best[..., 0] + best[..., 1]
    kept = torch.sort(total, dim=-1, descending=True, stable=True).indices[:, : routing.kept_groups]
    left_out = torch.ones_like(total, dtype=torch.bool).scatter(1, kept, value=False)
    return grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1)


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    if routing.scoring == "sigmoid":
        return _sigmoid(logits)
    if not len(logits):
        return logits
    grown = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    return grown / grown.sum(dim=-1, keepdim=True)


def _sigmoid(logits: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-logits))


def _weighted(rows: Tensor, index: Tensor, weights: Tensor, experts: ExpertMatrices, compute: Compute) -> Tensor:
    """The sum over each row's experts in the order of their ranks: [T, H], float32 or wider."""
    (num_rows, top_k), width = index.shape, rows.shape[1]
    flat = index.flatten()
    order = torch.argsort(flat, stable=True)  # of the pairs of a row and a rank, by expert
    outputs = rows.new_zeros(num_rows * top_k, width)
    for expert in range(experts.count):
        pairs = order[flat[order] == expert]
        if len(pairs):
            outputs[pairs] = compute(rows, pairs // top_k, expert, experts)
    each = _wide(outputs).view(num_rows, top_k, width)
    total = each.new_zeros(num_rows, width)
    for rank in range(top_k):
        total = total + weights[:, rank, None].to(each.dtype) * each[:, rank]
    return total


def expert_rows_of(rows: Tensor, chosen: Tensor, expert: int, experts: ExpertMatrices) -> Tensor:
    """One expert's result for the rows [R] of rows [T, H], in their dtype."""
    gate, up, down = matrices_of(expert, experts)

    def compute(some: Tensor) -> Tensor:
        inner = gated(_wide(project(some, gate)), _wide(project(some, up)), experts.activation).to(some.dtype)
        return project(inner, down)

    return by_tiles(compute, rows[chosen])


def matrices_of(expert: int, experts: ExpertMatrices) -> tuple[Linear, Linear, Linear]:
    """An expert's gate, up and down, without the rows that they are filled up with."""
    above = experts.gate_up.weight.shape[0] // 2  # where up's rows begin
    first, width = expert * expert_rows(experts.inner), experts.gate_up.weight.shape[1]
    gate, up = (_rows_of(experts.gate_up, at, experts.inner) for at in (first, above + first))
    return gate, up, _rows_of(experts.down, expert * expert_rows(width), width)


def _rows_of(matrix: Linear, first: int, count: int) -> Linear:
    part = slice(first, first + count)
    return Linear(matrix.weight[part], None if matrix.bias is None else matrix.bias[part])


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
