"""Mixtures of experts: the choice of each row's experts, their products by expert, and the weighted sum.

Promises: launches follow from the numbers of rows, experts and columns, so a captured graph serves any choice, and
nothing waits for the device. A row's sums have one order each: over k within an expert, and of its experts by rank.

Launches: the norm, the router, the choice, the pairs of rows and ranks by expert, gate and up with the activation,
down, the sum. A program of a product is a tile of columns of one expert; it walks the rows that have chosen this
expert, and ends at once where there are none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.kernel_set import ExpertMatrices, ExpertRows, Norm, Routing, expert_rows
from quire_kernels.reference.linear import Linear
from quire_kernels.triton.activation import activated
from quire_kernels.triton.norm import rms_norm

_ROUTER_TILE = 16  # rows, and experts
_BLOCK_K = 64
_PAIRS = 1024  # that a program looks at together
_COLUMNS = 1024  # of a row's sum
_FEW_ROWS, _ROWS = 16, 64  # of a tile


@triton.jit
def router_kernel(  # noqa: PLR0917
    x, weight, bias, logits, num_rows, num_experts, depth,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """logits [T, E] = x [T, H] @ weight [E, H].T (+ bias [E]) in float32, not rounded. Programs: (row tiles, tiles)."""
    rows, experts = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, depth, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        here = (ks < depth)[None, :]
        a = tl.load(
            x + rows.to(tl.int64)[:, None] * depth + ks[None, :], mask=(rows < num_rows)[:, None] & here, other=0.0
        )
        b = tl.load(
            weight + experts[:, None] * depth + ks[None, :], mask=(experts < num_experts)[:, None] & here, other=0.0
        )
        if weight.dtype.element_ty == tl.float32:  # no rounding may decide between two experts
            total = tl.dot(a.to(tl.float32), tl.trans(b), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total)
    if HAS_BIAS:
        total += tl.load(bias + experts, mask=experts < num_experts, other=0.0).to(tl.float32)[None, :]
    inside = (rows < num_rows)[:, None] & (experts < num_experts)[None, :]
    tl.store(logits + rows[:, None] * num_experts + experts[None, :], total, mask=inside)


@triton.jit
def _largest(values, among, places, PLACES: tl.constexpr):
    """The place of the largest value among some, of equals the lower one; the first of them where all are NaN."""
    best = tl.max(tl.where(among, values, float("-inf")), 0)
    at = tl.min(tl.where(among & (values >= best), places, PLACES), 0)
    return tl.where(at < PLACES, at, tl.min(tl.where(among, places, PLACES), 0))


@triton.jit
def choose_kernel(  # noqa: PLR0917
    logits, selection_bias, expert_scales, index, weights, num_experts, scale, least_sum, epsilon,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALISED: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr,
    EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """The experts of one row, best first, of equals the lower, and their weights; see `Routing`. Programs: (rows,).

    GROUP: experts of each of the GROUPS, of which KEPT are kept by the sum of their BEST largest values.
    """
    row = tl.program_id(0)
    experts, ranks = tl.arange(0, EXPERTS), tl.arange(0, RANKS)
    left = experts < num_experts
    z = tl.load(logits + row * num_experts + experts, mask=left, other=float("-inf"))
    if SIGMOID:
        scores = tl.div_rn(tl.full([EXPERTS], 1.0, tl.float32), 1.0 + tl.exp(-z))
    else:
        grown = tl.exp(z - tl.max(z, 0))
        scores = tl.div_rn(grown, tl.sum(grown, 0))
    decisive = z
    if BIASED:
        decisive = scores + tl.load(selection_bias + experts, mask=left, other=0.0)
    elif GROUPS > 1:
        decisive = scores
    if GROUPS > 1:
        of_group = experts // GROUP
        sums = tl.full([EXPERTS], float("-inf"), tl.float32)  # of each group, in the place of its number
        for group in tl.static_range(GROUPS):
            members = left & (of_group == group)
            at = _largest(decisive, members, experts, EXPERTS)
            value = tl.sum(tl.where(experts == at, decisive, 0.0), 0)
            if BEST == 2:
                at = _largest(decisive, members & (experts != at), experts, EXPERTS)
                value += tl.sum(tl.where(experts == at, decisive, 0.0), 0)
            sums = tl.where(experts == group, value, sums)
        groups, kept = experts < GROUPS, experts < 0
        for _ in tl.static_range(KEPT):
            at = _largest(sums, groups, experts, EXPERTS)
            groups &= experts != at
            kept |= of_group == at
        left &= kept
    chosen, found = tl.zeros([RANKS], tl.int32), tl.zeros([RANKS], tl.float32)
    total = 0.0
    for rank in tl.static_range(TOP_K):
        at = _largest(decisive, left, experts, EXPERTS)
        value = tl.sum(tl.where(experts == at, scores, 0.0), 0)
        chosen, found = tl.where(ranks == rank, at, chosen), tl.where(ranks == rank, value, found)
        total += value
        left &= experts != at
    if NORMALISED:
        total = tl.where(total < least_sum, least_sum, total)  # NaN stays NaN
        found = tl.div_rn(found, tl.zeros([RANKS], tl.float32) + (total + epsilon))
    found *= scale
    if SCALED:
        found *= tl.load(expert_scales + chosen, mask=ranks < TOP_K, other=0.0)
    tl.store(index + row * TOP_K + ranks, chosen, mask=ranks < TOP_K)
    tl.store(weights + row * TOP_K + ranks, found, mask=ranks < TOP_K)


@triton.jit
def gate_rows_kernel(wide, logits, out, width, BLOCK: tl.constexpr):
    """out = wide * sigmoid(the row's logit). Programs: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.div_rn(tl.full([1], 1.0, tl.float32), 1.0 + tl.exp(-tl.load(logits + row + tl.arange(0, 1))))
    value = tl.load(wide + row * width + columns, mask=inside, other=0.0).to(tl.float32) * gate
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def group_kernel(index, order, starts, num_pairs, PAIRS: tl.constexpr):
    """Places of one expert's pairs in `order`, which has pairs by expert, else as they are. Programs: (E + 1,)."""
    expert = tl.program_id(0)
    begin = tl.zeros([], tl.int32)
    for at in range(0, num_pairs, PAIRS):
        pairs = at + tl.arange(0, PAIRS)
        whose = tl.load(index + pairs, mask=pairs < num_pairs, other=-1)
        begin += tl.sum(((whose >= 0) & (whose < expert)).to(tl.int32), 0)
    tl.store(starts + expert, begin)
    if expert < tl.num_programs(0) - 1:
        for at in range(0, num_pairs, PAIRS):
            pairs = at + tl.arange(0, PAIRS)
            mine = tl.load(index + pairs, mask=pairs < num_pairs, other=-1) == expert
            place = begin + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(order + place, pairs, mask=mine)
            begin += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def gate_up_kernel(  # noqa: PLR0917
    x, weight, bias, inner, order, starts, depth, width, rows_of_expert, above,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """inner [pairs by expert, I] = activation(gate) * up of the pairs' rows. Programs: (tiles of I, E).

    An expert's gate has its rows in `weight` from its number times `rows_of_expert` on, its up `above` rows below.
    """
    expert = tl.program_id(1)
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside = columns < width
    first = expert.to(tl.int64) * rows_of_expert + columns
    end = tl.load(starts + expert + 1)
    for at in range(tl.load(starts + expert), end, BLOCK_M):
        places = at + tl.arange(0, BLOCK_M)
        row_inside = places < end
        rows = tl.load(order + places, mask=row_inside, other=0) // TOP_K
        gate, up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            ks = k + tl.arange(0, BLOCK_K)
            here = (ks < depth)[None, :]
            a = tl.load(
                x + rows.to(tl.int64)[:, None] * depth + ks[None, :], mask=row_inside[:, None] & here, other=0.0
            )
            of_gate = weight + first[:, None] * depth + ks[None, :]
            b = tl.load(of_gate, mask=column_inside[:, None] & here, other=0.0)
            gate = tl.dot(a, tl.trans(b), gate)
            b = tl.load(of_gate + above.to(tl.int64) * depth, mask=column_inside[:, None] & here, other=0.0)
            up = tl.dot(a, tl.trans(b), up)
        if HAS_BIAS:
            gate += tl.load(bias + first, mask=column_inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + above + first, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        value = activated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
        place = inner + places.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(place, value.to(dtype), mask=row_inside[:, None] & column_inside[None, :])


@triton.jit
def down_kernel(  # noqa: PLR0917
    inner, weight, bias, outputs, order, starts, depth, width, rows_of_expert,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """outputs [pairs, H], in the pairs' own order, from inner [pairs by expert, I]. Programs: (tiles of H, E)."""
    expert = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside = columns < width
    first = expert.to(tl.int64) * rows_of_expert + columns
    end = tl.load(starts + expert + 1)
    for at in range(tl.load(starts + expert), end, BLOCK_M):
        places = at + tl.arange(0, BLOCK_M)
        row_inside = places < end
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            ks = k + tl.arange(0, BLOCK_K)
            here = (ks < depth)[None, :]
            place = inner + places.to(tl.int64)[:, None] * depth + ks[None, :]
            a = tl.load(place, mask=row_inside[:, None] & here, other=0.0)
            b = tl.load(weight + first[:, None] * depth + ks[None, :], mask=column_inside[:, None] & here, other=0.0)
            total = tl.dot(a, tl.trans(b), total)
        if HAS_BIAS:
            total += tl.load(bias + first, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        pairs = tl.load(order + places, mask=row_inside, other=0)
        into = outputs + pairs.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(into, total.to(outputs.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


@triton.jit
def sum_kernel(  # noqa: PLR0917
    outputs, index, weights, residual, out, num_experts, width, scale,
    TOP_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (residual + scale *) the weighted sum of one row's experts, by rank. Programs: (rows, blocks of H)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = row * TOP_K + rank
        expert = tl.load(index + pair)
        there = inside & (expert >= 0) & (expert < num_experts)
        value = tl.load(outputs + pair * width + columns, mask=there, other=0.0).to(tl.float32)
        total += tl.where(there, value * tl.load(weights + pair), 0.0)
    if HAS_RESIDUAL:
        total = tl.load(residual + row * width + columns, mask=inside, other=0.0).to(tl.float32) + total * scale
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)


class _Choice(NamedTuple):
    """The experts of rows, and their pairs by expert."""

    chosen: Tensor  # [T, k] int32
    weights: Tensor  # [T, k] float32
    order: Tensor  # [T * k] int32
    starts: Tensor  # [E + 1] int32


class ExpertOps:
    """The ops of a kernel set on mixtures of experts. `same_tiles`: tiles of one height, for any number of rows."""

    def __init__(self, *, same_tiles: bool) -> None:
        self._same_tiles = same_tiles

    def mix_experts(  # noqa: PLR0917 - the op's contract
        self,
        x: Tensor,
        norm: Norm | None,
        routing: Routing,
        experts: ExpertMatrices,
        scale: float,
        residual: Tensor | None,
    ) -> Tensor:
        rows = x.contiguous() if norm is None else rms_norm(x, norm)
        _, index, weights = _routed(rows if routing.norm is None else x, routing, experts.count)
        return self._sums(rows, index, weights, experts, scale, residual)

    def route(self, x: Tensor, routing: Routing, count: int) -> tuple[Tensor, Tensor, Tensor]:
        logits, index, weights = _routed(x, routing, count)
        return logits, index.long(), weights

    def given_experts(self, x: Tensor, index: Tensor, weights: Tensor, experts: ExpertMatrices) -> Tensor:
        return self._sums(x.contiguous(), index.to(torch.int32).contiguous(), weights.contiguous(), experts, 1.0, None)

    def gate_rows(self, x: Tensor, norm: Norm | None, w: Linear, wide: Tensor) -> Tensor:
        rows, wide = x.contiguous() if norm is None else rms_norm(x, norm), wide.contiguous()
        if len(rows) != len(wide):
            raise ValueError(f"{len(rows)} rows cannot be gates of {len(wide)}")
        logits, (num_rows, width) = _logits(rows, w, 1), wide.shape
        if num_rows:
            grid = (num_rows, triton.cdiv(width, _COLUMNS))
            gate_rows_kernel[grid](wide, logits, wide, width, BLOCK=_COLUMNS, num_warps=4)
        return wide

    def first(self, x: Tensor, norm: Norm | None, routing: Routing, experts: ExpertMatrices) -> ExpertRows:
        rows = x.contiguous() if norm is None else rms_norm(x, norm)
        _, index, weights = _routed(rows if routing.norm is None else x, routing, experts.count)
        return self._first(rows, index, weights, experts)

    def second(
        self, rows: ExpertRows, experts: ExpertMatrices, scale: float, residual: Tensor | None, width: int
    ) -> Tensor:
        """The columns of `experts.down`, in residual's memory if there is one."""
        within, choice = rows.within, rows.facts
        top_k, count, inner = choice.chosen.shape[1], experts.count, within.shape[1]
        num_rows, down = len(choice.chosen), experts.down
        _check(down, (count * expert_rows(width), inner), within)
        out = within.new_empty(num_rows, width) if residual is None else residual
        if not num_rows:
            return out
        tiles = self._tiles(len(within), count)
        outputs = within.new_empty(len(within), width)
        down_kernel[triton.cdiv(width, tiles["BLOCK_N"]), count](
            within, down.weight, down.bias, outputs, choice.order, choice.starts, inner, width, expert_rows(width),
            HAS_BIAS=down.bias is not None, **tiles,
        )  # fmt: skip
        sum_kernel[num_rows, triton.cdiv(width, _COLUMNS)](
            outputs, choice.chosen, choice.weights, residual, out, count, width, float(scale),
            TOP_K=top_k, HAS_RESIDUAL=residual is not None, BLOCK=_COLUMNS, num_warps=4,
        )  # fmt: skip
        return out

    def _sums(  # noqa: PLR0917 - what a mixture takes
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        experts: ExpertMatrices,
        scale: float,
        residual: Tensor | None,
    ) -> Tensor:
        """x [T, H], index [T, k] int32, weights [T, k] float32 -> [T, H], in residual's memory if there is one."""
        return self.second(self._first(x, index, weights, experts), experts, scale, residual, x.shape[1])

    def _first(self, x: Tensor, index: Tensor, weights: Tensor, experts: ExpertMatrices) -> ExpertRows:
        (num_rows, width), top_k, count, inner = x.shape, index.shape[1], experts.count, experts.inner
        gate_up, pairs = experts.gate_up, num_rows * top_k
        _check(gate_up, (2 * count * expert_rows(inner), width), x)
        order = torch.empty(pairs, dtype=torch.int32, device=x.device)
        starts = torch.empty(count + 1, dtype=torch.int32, device=x.device)
        within = x.new_empty(pairs, inner)
        if num_rows:
            group_kernel[(count + 1,)](index, order, starts, pairs, PAIRS=_PAIRS, num_warps=4)
            tiles = self._tiles(pairs, count)
            gate_up_kernel[triton.cdiv(inner, tiles["BLOCK_N"]), count](
                x, gate_up.weight, gate_up.bias, within, order, starts,
                width, inner, expert_rows(inner), len(gate_up.weight) // 2,
                TOP_K=top_k, HAS_BIAS=gate_up.bias is not None, ACTIVATION=experts.activation, **tiles,
            )  # fmt: skip
        return ExpertRows(within, _Choice(index, weights, order, starts))

    def _tiles(self, pairs: int, count: int) -> dict[str, int]:
        few = not self._same_tiles and pairs <= _FEW_ROWS * count
        return {
            "BLOCK_M": _FEW_ROWS if few else _ROWS,
            "BLOCK_N": 64 if few else 32,  # gate's sums and up's are in registers
            "BLOCK_K": _BLOCK_K,
            "STAGES": 3,
            "num_warps": 4,
        }


def _logits(rows: Tensor, router: Linear, count: int) -> Tensor:
    """[T, count] float32 of rows [T, H]."""
    num_rows, depth = rows.shape
    if router.weight.shape != (count, depth) or router.weight.dtype not in (rows.dtype, torch.float32):
        found = f"{router.weight.dtype} {list(router.weight.shape)}"
        raise ValueError(f"a router to {count} of {rows.dtype} rows of {depth} cannot be {found}")
    logits = torch.empty(num_rows, count, dtype=torch.float32, device=rows.device)
    if num_rows:
        router_kernel[triton.cdiv(num_rows, _ROUTER_TILE), triton.cdiv(count, _ROUTER_TILE)](
            rows, router.weight, router.bias, logits, num_rows, count, depth,
            HAS_BIAS=router.bias is not None, BLOCK=_ROUTER_TILE, BLOCK_K=2 * _BLOCK_K, num_warps=1, num_stages=4,
        )  # fmt: skip
    return logits


def _routed(rows: Tensor, routing: Routing, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for rows [T, H] the logits [T, E], the experts [T, k] int32, best first, and their weights."""
    routing.check(count)
    rows = rows.contiguous() if routing.norm is None else rms_norm(rows, routing.norm)
    num_rows, bias, scales = len(rows), routing.selection_bias, routing.expert_scales
    logits = _logits(rows, routing.weight, count)
    index = torch.empty(num_rows, routing.top_k, dtype=torch.int32, device=rows.device)
    weights = torch.empty(num_rows, routing.top_k, dtype=torch.float32, device=rows.device)
    if num_rows:
        choose_kernel[(num_rows,)](
            logits, bias, scales, index, weights, count,
            float(routing.scale), float(routing.least_sum), float(routing.epsilon),
            TOP_K=routing.top_k, SIGMOID=routing.scoring == "sigmoid", NORMALISED=routing.normalised,
            BIASED=bias is not None, SCALED=scales is not None,
            GROUPS=routing.groups, GROUP=count // routing.groups, KEPT=routing.kept_groups, BEST=routing.best_of_group,
            EXPERTS=triton.next_power_of_2(count), RANKS=triton.next_power_of_2(routing.top_k), num_warps=1,
        )  # fmt: skip
    return logits, index, weights


def _check(matrix: Linear, shape: tuple[int, int], rows: Tensor) -> None:
    """ValueError unless it is one for such rows."""
    found = matrix.weight
    if found.shape != shape or found.dtype != rows.dtype or not found.is_contiguous():
        raise ValueError(
            f"experts of {rows.dtype} rows of {rows.shape[1]} need {list(shape)}, not {found.dtype} {list(found.shape)}"
        )
