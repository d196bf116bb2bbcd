"""The interpreter of a layer program: a kernel set's ops, called in the order of its records.

Promises: the specification of `KernelSet.bind_layers`. Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from quire_kernels.kernel_set import (
    AdaptedOps,
    Addend,
    Attend,
    GateMixed,
    GateWide,
    GroupedInput,
    KeepSampled,
    KernelSet,
    LayerOp,
    LinearAdd,
    LinearWeight,
    MixExperts,
    Norm,
    NormAdd,
    NormGateUp,
    NormHold,
    NormLinear,
    Project,
    RopeWrite,
    Source,
    StepAdapters,
    StepInput,
)


def matrices(program: Iterable[LayerOp]) -> Iterator[LinearWeight]:
    """All packed matrices of a program."""
    for op in program:
        if isinstance(op, MixExperts):
            yield from (op.routing.weight, op.experts.gate_up, op.experts.down)
        elif isinstance(op, NormLinear | NormGateUp | GateMixed | LinearAdd | Project | GateWide):
            yield op.weight


def run_layers(  # noqa: PLR0912, PLR0917 - a branch for each op; called as `BoundLayers` is
    ops: KernelSet,
    program: Sequence[LayerOp],
    x: Tensor,
    kv: Sequence[Tensor],
    step: StepInput,
    adapters: StepAdapters | None = None,
) -> Tensor:
    """x [T, H], the parts of the pool -> the sample rows [S, H] after all layers. May reuse x's memory."""
    rows: GroupedInput = step
    q = y = held = x
    source: dict[Source, Tensor] = {}
    for op in program:
        match op:
            case NormLinear():
                source["wide"] = _norm_linear(ops, x, op.norm, op, adapters)  # [T, N]
            case RopeWrite():
                q = ops.rope_write(
                    source["wide"], op.rope, op.shape, kv[op.part], op.layer, rows.in_group(op.group)
                )  # [T, Hq, D]
            case KeepSampled():
                if step.sampled is not None:
                    q, x, rows = q[step.sample_rows], x[step.sample_rows], step.sampled
                    adapters = None if adapters is None else adapters.of_rows(step.sample_rows)
                    if not len(x):
                        break
            case Attend():
                source["mixed"] = ops.attention(
                    q, op.shape, kv[op.part], op.layer, rows.in_group(op.group)
                )  # [T, Hq * D]
            case GateMixed():
                gate = ops.norm_linear(x, op.norm, op.weight)  # [T, Hq * D]
                source["mixed"] = ops.mul_sigmoid(source["mixed"], gate)
            case LinearAdd():
                added = _linear_add(ops, source[op.source], op, x if op.to == "x" else y, adapters)
                x, y = (added, y) if op.to == "x" else (x, added)
            case NormGateUp():
                source["wide"] = _norm_gate_up(ops, x, op, adapters)  # [T, I]
            case Project():
                y = _norm_linear(ops, source[op.source], None, op, adapters)  # [T, H]
            case NormAdd():
                x = ops.norm_add(y if op.source == "y" else held, op.norm, x, op.scale)
            case NormHold():
                held = ops.norm_add(y, op.norm, held if op.adds else torch.zeros_like(y), 1.0)
            case MixExperts():
                mixed = _mix_experts(ops, x, op, adapters)
                x, y = (mixed, y) if op.to == "x" else (x, mixed)
            case GateWide():
                assert ops.gate_rows is not None
                source["wide"] = ops.gate_rows(x, op.norm, op.weight, source["wide"])
    return x


def _addend(ops: KernelSet, site: int | None, adapters: StepAdapters | None) -> tuple[AdaptedOps, Addend] | None:
    addend = None if adapters is None else adapters.at(site)
    if addend is None:
        return None
    if ops.adapted is None:
        raise ValueError(f"the {ops.name} kernels compute no adapters")
    return ops.adapted, addend


def _norm_linear(
    ops: KernelSet, x: Tensor, norm: Norm | None, op: NormLinear | Project, adapters: StepAdapters | None
) -> Tensor:
    found = _addend(ops, op.site, adapters)
    if found is None:
        return ops.norm_linear(x, norm, op.weight)
    return found[0].norm_linear(x, norm, op.weight, found[1])


def _norm_gate_up(ops: KernelSet, x: Tensor, op: NormGateUp, adapters: StepAdapters | None) -> Tensor:
    found = _addend(ops, op.site, adapters)
    if found is None:
        return ops.norm_gate_up(x, op.norm, op.weight, op.activation)
    return found[0].norm_gate_up(x, op.norm, op.weight, op.activation, found[1])


def _linear_add(ops: KernelSet, x: Tensor, op: LinearAdd, residual: Tensor, adapters: StepAdapters | None) -> Tensor:
    found = _addend(ops, op.site, adapters)
    if found is None:
        return ops.linear_add(x, op.weight, residual, op.scale)
    return found[0].linear_add(x, op.weight, residual, op.scale, found[1])


def _mix_experts(ops: KernelSet, x: Tensor, op: MixExperts, adapters: StepAdapters | None) -> Tensor:
    assert ops.mix_experts is not None
    residual = x if op.to == "x" else None
    above, below = (_addend(ops, None if op.site is None else op.site + i, adapters) for i in range(2))
    found = above or below
    if found is None:
        return ops.mix_experts(x, op.norm, op.routing, op.experts, op.scale, residual)
    if found[0].mix_experts is None:
        raise ValueError(f"the {ops.name} kernels compute no adapters of experts")
    return found[0].mix_experts(
        x,
        op.norm,
        op.routing,
        op.experts,
        op.scale,
        residual,
        None if above is None else above[1],
        None if below is None else below[1],
    )
