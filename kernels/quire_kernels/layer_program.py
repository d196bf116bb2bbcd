"""The interpreter of a layer program: a kernel set's ops, called in the order of its records.

Promises: the specification of `KernelSet.bind_layers`. Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from quire_kernels.kernel_set import (
    Attend,
    GroupedInput,
    KeepSampled,
    KernelSet,
    LayerOp,
    LinearAdd,
    LinearWeight,
    MixExperts,
    NormAdd,
    NormGateUp,
    NormLinear,
    Project,
    RopeWrite,
    Source,
    StepInput,
)


def matrices(program: Iterable[LayerOp]) -> Iterator[LinearWeight]:
    """All packed matrices of a program."""
    for op in program:
        if isinstance(op, MixExperts):
            yield from (op.routing.weight, op.experts.gate_up, op.experts.down)
        elif isinstance(op, NormLinear | NormGateUp | LinearAdd | Project):
            yield op.weight


def run_layers(ops: KernelSet, program: Sequence[LayerOp], x: Tensor, kv: Sequence[Tensor], step: StepInput) -> Tensor:
    """x [T, H], the parts of the pool -> the sample rows [S, H] after all layers. May reuse x's memory."""
    rows: GroupedInput = step
    q = y = x
    source: dict[Source, Tensor] = {}
    for op in program:
        match op:
            case NormLinear():
                source["wide"] = ops.norm_linear(x, op.norm, op.weight)  # [T, N]
            case RopeWrite():
                q = ops.rope_write(
                    source["wide"], op.rope, op.shape, kv[op.part], op.layer, rows.in_group(op.group)
                )  # [T, Hq, D]
            case KeepSampled():
                if step.sampled is not None:
                    q, x, rows = q[step.sample_rows], x[step.sample_rows], step.sampled
                    if not len(x):
                        break
            case Attend():
                source["mixed"] = ops.attention(
                    q, op.shape, kv[op.part], op.layer, rows.in_group(op.group)
                )  # [T, Hq * D]
            case LinearAdd():
                x = ops.linear_add(source[op.source], op.weight, x, op.scale)
            case NormGateUp():
                source["wide"] = ops.norm_gate_up(x, op.norm, op.weight, op.activation)  # [T, I]
            case Project():
                y = ops.norm_linear(source[op.source], None, op.weight)  # [T, H]
            case NormAdd():
                x = ops.norm_add(y, op.norm, x, op.scale)
            case MixExperts():
                assert ops.mix_experts is not None
                mixed = ops.mix_experts(x, op.norm, op.routing, op.experts, op.scale, x if op.to == "x" else None)
                x, y = (mixed, y) if op.to == "x" else (x, mixed)
    return x
