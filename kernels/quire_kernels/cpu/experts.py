"""Mixtures of experts through the C++ kernels.

Promises: shapes and types are checked here, so that C++ gets valid pointers only; activations are bfloat16. Must not
know: requests.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, byref

import torch
from torch import Tensor

from quire_kernels.cpu.context import Context
from quire_kernels.cpu.linear import GATES, norm_args, rows_of
from quire_kernels.cpu.low_rank import expert_addend_args
from quire_kernels.cpu.packing import PackedLinear
from quire_kernels.cpu.ranks import raise_for_lost
from quire_kernels.cpu.signatures import ExpertsArgs, RoutingArgs
from quire_kernels.cpu.stored import STACKED
from quire_kernels.kernel_set import Addend, ExpertMatrices, Norm, Routing, Scoring, expert_rows

_MOST_PARTS = 3  # of a router of float32, whose 24 bits are three times the 8 of bfloat16
# `enum class Scoring`.
_SCORINGS: dict[Scoring, int] = {"softmax": 0, "sigmoid": 1}


class ExpertOps:
    """Blocks of experts, each in one call."""

    def __init__(self, context: Context) -> None:
        self._context = context  # keeps the workers
        self._handle = context.handle
        self._mix = context.library.quire_mix_experts
        self._given = context.library.quire_given_experts
        self._gate = context.library.quire_gate_rows
        self._route = context.library.quire_route

    def mix_experts(  # noqa: PLR0917 - the op's contract
        self,
        x: Tensor,
        norm: Norm | None,
        routing: Routing,
        experts: ExpertMatrices,
        scale: float,
        residual: Tensor | None,
        above: Addend | None = None,
        below: Addend | None = None,
    ) -> Tensor:
        """`above` and `below`: what adapters add, if any does."""
        x = rows_of(x, experts.gate_up.num_inputs)
        rows, width = x.shape
        if residual is not None:
            residual = rows_of(residual, width)
            if len(residual) != rows:
                raise ValueError(f"{rows} rows cannot be added to {len(residual)}")
        out = torch.empty_like(x) if residual is None else residual
        plain = above is None and below is None
        adapters = None if plain else byref(expert_addend_args(above, below, experts, rows, width))
        failed = self._mix(
            self._handle,
            byref(routing_args(routing, experts.count, width)),
            byref(experts_args(experts, width)),
            x.data_ptr(),
            rows,
            None if norm is None else byref(norm_args(norm, width)),
            scale,
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            adapters,
            0,
        )
        raise_for_lost(failed)
        if failed:
            raise MemoryError(f"mixing the experts of {rows} rows")
        return out

    def given_experts(self, x: Tensor, index: Tensor, weights: Tensor, experts: ExpertMatrices) -> Tensor:
        x = rows_of(x, experts.gate_up.num_inputs)
        rows, width = x.shape
        for given, dtype in ((index, torch.int64), (weights, torch.float32)):
            if given.dtype is not dtype or given.dim() != 2 or given.shape != index.shape or len(given) != rows:
                raise ValueError(f"the experts of {rows} rows must be given as {dtype} [{rows}, k]")
        index, weights, out = index.contiguous(), weights.contiguous(), torch.empty_like(x)
        failed = self._given(
            self._handle,
            byref(experts_args(experts, width)),
            x.data_ptr(),
            rows,
            index.shape[1],
            index.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
        )
        raise_for_lost(failed)
        if failed:
            raise MemoryError(f"mixing the experts of {rows} rows")
        return out

    def route(self, x: Tensor, routing: Routing, count: int) -> tuple[Tensor, Tensor, Tensor]:
        x = rows_of(x, routing.weight.num_inputs)
        rows, width = x.shape
        logits = torch.empty(rows, routing.weight.num_outputs)
        index = torch.empty(rows, routing.top_k, dtype=torch.int32)
        weights = torch.empty(rows, routing.top_k)
        failed = self._route(
            self._handle,
            byref(routing_args(routing, count, width)),
            count,
            x.data_ptr(),
            rows,
            logits.data_ptr(),
            index.data_ptr(),
            weights.data_ptr(),
        )
        if failed:
            raise MemoryError(f"choosing the experts of {rows} rows")
        return logits[:, :count], index.long(), weights

    def gate_rows(self, x: Tensor, norm: Norm | None, w: PackedLinear, wide: Tensor) -> Tensor:
        if w.gate_up or w.num_outputs != 1:
            raise ValueError(f"a gate of rows has one output, not {w.num_outputs}")
        x, width = rows_of(x, w.num_inputs), wide.shape[-1]
        wide = rows_of(wide, width)
        rows = len(x)
        if len(wide) != rows:
            raise ValueError(f"{rows} rows cannot gate {len(wide)}")
        arguments = None if norm is None else byref(norm_args(norm, w.num_inputs))
        if self._gate(self._handle, w.address, x.data_ptr(), rows, arguments, width, wide.data_ptr()):
            raise MemoryError(f"gating {rows} rows")
        return wide


def router_packer(pack: Callable[[Tensor, Tensor | None], PackedLinear]) -> Callable[..., PackedLinear]:
    """A packer of routers: one of float32 becomes matrices of bfloat16, one below the other, whose sum is exact."""

    def packed(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        if weight.dtype is not torch.float32:
            return pack(weight, bias)
        parts, rest = [weight.bfloat16()], weight
        for _ in range(_MOST_PARTS - 1):
            rest = rest - parts[-1].float()
            if not bool(rest.any()):
                break
            parts.append(rest.bfloat16())
        if bias is not None:
            bias = torch.cat([bias.bfloat16(), *[torch.zeros_like(bias, dtype=torch.bfloat16)] * (len(parts) - 1)])
        return pack(torch.cat(parts), bias)

    return packed


def routing_args(routing: Routing, count: int, width: int) -> RoutingArgs:
    """The routing of rows of `width` to so many experts for C++; the tensors are the caller's to keep."""
    routing.check(count)
    weight, bias, scales = routing.weight, routing.selection_bias, routing.expert_scales
    parts = weight.num_outputs // count
    if (weight.num_inputs, weight.num_outputs, weight.gate_up) != (width, parts * count, False) or not parts:
        raise ValueError(f"the router must map {width} values to {count} experts")
    norm = None if routing.norm is None else norm_args(routing.norm, width)
    found = RoutingArgs(
        weight=weight.address,
        selection_bias=None if bias is None else bias.data_ptr(),
        expert_scales=None if scales is None else scales.data_ptr(),
        norm=None if norm is None else addressof(norm),
        top_k=routing.top_k,
        scoring=_SCORINGS[routing.scoring],
        groups=routing.groups,
        kept_groups=routing.kept_groups,
        best_of_group=routing.best_of_group,
        normalised=routing.normalised,
        least_sum=routing.least_sum,
        epsilon=routing.epsilon,
        scale=routing.scale,
    )
    found.kept = norm
    return found


def experts_args(experts: ExpertMatrices, width: int) -> ExpertsArgs:
    """The experts of rows of `width` for C++; the matrices are the caller's to keep."""
    up: PackedLinear = experts.gate_up
    down: PackedLinear = experts.down
    sizes = (up.num_inputs, up.num_outputs, down.num_inputs, down.num_outputs)
    wanted = (width, experts.count * expert_rows(experts.inner), experts.inner, experts.count * expert_rows(width))
    if sizes != wanted or not up.gate_up or down.gate_up or experts.count < 1:
        raise ValueError(f"the sizes of {experts.count} experts do not fit together: {sizes}, not {wanted}")
    if STACKED in {up.args.kind, down.args.kind}:
        raise ValueError("all experts of a layer must be packed in one form")
    return ExpertsArgs(
        gate_up=up.address,
        down=down.address,
        count=experts.count,
        inner=experts.inner,
        activation=GATES[experts.activation],
    )
