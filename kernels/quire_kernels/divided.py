"""A kernel set whose products are divided among ranks, one device each: a rank computes some columns and gathers all.

Promises: nothing is added up across ranks, so that where a set's columns do not depend on the other columns of a call,
no bit depends on the number of ranks. No op waits for the device, and a CUDA graph may hold all of them. Must not know:
the engine, processes.

Exchanges of a layer: what attention gives, x behind its projection, the gated rows, of experts too, x behind their
projection; and of a step the logits. Queries, keys and values are of the rank's own heads, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.kernel_set import (
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
from quire_kernels.ranks import DeviceCollective, columns_of, widest_share


class OwnColumns(NamedTuple):
    """Some columns of a product: the rank's own."""

    weight: LinearWeight
    whole: int  # columns of all ranks; of a gate-up pair of both together


def divided(kernels: KernelSet, collective: DeviceCollective) -> KernelSet:
    """The set for one rank, whose programs `bind_layers` runs. The matrices that it is given to pack are the rank's own
    rows of each, of queries, keys and values the heads, of all others `columns_of`; `part_of` gets all of them.

    Raises ValueError for a set that cannot be divided so.
    """
    base_part_of = kernels.part_of
    if base_part_of is None:
        raise ValueError(f"the {kernels.name} kernels are not divided among ranks")
    packed_bytes = kernels.packed_bytes

    def part_of(w: LinearWeight, rows: int) -> OwnColumns:
        return OwnColumns(base_part_of(w, rows), rows)

    def logits(x: Tensor, norm: Norm, w: LinearWeight) -> Tensor:
        if not isinstance(w, OwnColumns):
            raise ValueError("the head is divided among ranks too")
        own = kernels.logits(x, norm, w.weight)
        # They were rounded to the type of the rows, and lose nothing by it once more.
        return _gathered(collective, own.to(x.dtype), w.whole).float()

    return replace(
        kernels,
        logits=logits,
        part_of=part_of,
        is_divided=True,
        bind_layers=partial(DividedLayers, kernels, collective),
        packed_bytes=None if packed_bytes is None else lambda w: packed_bytes(_own(w)),
        # Whole products of one call, which no rank has.
        bind_decodes=None,
        greedy=None,
        linear=None,
        join=None,
        adapted=None,
        mix_experts=None,
        given_experts=None,
    )


class DividedLayers:
    """See `BoundLayers`: the ops of a program in order, with what ranks exchange between them."""

    def __init__(self, ops: KernelSet, collective: DeviceCollective, program: Sequence[LayerOp]) -> None:
        self._ops, self._collective, self._program = ops, collective, program
        if ops.expert_halves is None and any(isinstance(op, MixExperts) for op in program):
            raise ValueError(f"the {ops.name} kernels divide no experts among ranks")

    def __call__(  # noqa: PLR0912 - a branch for each op
        self, x: Tensor, kv: Sequence[Tensor], step: StepInput, adapters: StepAdapters | None = None
    ) -> Tensor:
        if adapters is not None:
            raise ValueError("adapters are not divided among ranks on devices")
        ops, rows = self._ops, _every(step)
        q = y = held = x
        own: dict[Source, tuple[Tensor, int]] = {}  # the rank's columns, and the number of all
        for op in self._program:
            match op:
                case NormLinear():
                    own["wide"] = ops.norm_linear(x, op.norm, _own(op.weight)), 0
                case RopeWrite():
                    q = ops.rope_write(
                        own["wide"][0], op.rope, op.shape, kv[op.part], op.layer, rows.in_group(op.group)
                    )
                case KeepSampled():
                    if step.sampled is not None:
                        q, x, rows = q[step.sample_rows], x[step.sample_rows], step.sampled
                        if not len(x):
                            break
                case Attend():
                    mixed = ops.attention(q, op.shape, kv[op.part], op.layer, rows.in_group(op.group))
                    own["mixed"] = mixed, mixed.shape[1] * self._collective.size
                case GateMixed():
                    mixed, whole = own["mixed"]
                    own["mixed"] = ops.mul_sigmoid(mixed, ops.norm_linear(x, op.norm, _own(op.weight))), whole
                case LinearAdd():
                    added = self._linear_add(self._whole(*own[op.source]), op, x if op.to == "x" else y)
                    x, y = (added, y) if op.to == "x" else (x, added)
                case NormGateUp():
                    gated = ops.norm_gate_up(x, op.norm, _own(op.weight), op.activation)
                    own["wide"] = gated, _columns(op.weight) // 2
                case Project():
                    projected = ops.norm_linear(self._whole(*own[op.source]), None, _own(op.weight))
                    y = self._whole(projected, _columns(op.weight))
                case NormAdd():
                    x = ops.norm_add(y if op.source == "y" else held, op.norm, x, op.scale)
                case NormHold():
                    held = ops.norm_add(y, op.norm, held if op.adds else torch.zeros_like(y), 1.0)
                case MixExperts():
                    mixed = self._mix_experts(x, op)
                    x, y = (mixed, y) if op.to == "x" else (x, mixed)
                case GateWide():
                    assert ops.gate_rows is not None
                    wide, whole = own["wide"]
                    own["wide"] = ops.gate_rows(x, op.norm, op.weight, wide), whole
        return x

    def _mix_experts(self, x: Tensor, op: MixExperts) -> Tensor:
        """The rank's columns of every expert, then those of the sum. All ranks choose the same experts."""
        halves, experts = self._ops.expert_halves, op.experts
        rank, size = self._collective.rank, self._collective.size
        assert halves is not None
        inner, columns = columns_of(rank, size, experts.inner), columns_of(rank, size, x.shape[1])
        width = columns.stop - columns.start
        own = replace(experts, inner=inner.stop - inner.start, gate_up=_own(experts.gate_up), down=_own(experts.down))
        rows = halves.first(x, op.norm, op.routing, own)
        rows = rows._replace(within=self._whole(rows.within, experts.inner))
        residual = x[:, columns].contiguous() if op.to == "x" else None
        return self._whole(halves.second(rows, own, op.scale, residual, width), x.shape[1])

    def _linear_add(self, x: Tensor, op: LinearAdd, residual: Tensor) -> Tensor:
        """The rank's columns of the sum, rounded once as they would be by one rank, and then all."""
        columns = columns_of(self._collective.rank, self._collective.size, residual.shape[1])
        own = residual[:, columns].contiguous()
        return self._whole(self._ops.linear_add(x, _own(op.weight), own, op.scale), residual.shape[1])

    def _whole(self, own: Tensor, columns: int) -> Tensor:
        return _gathered(self._collective, own, columns)


def _gathered(collective: DeviceCollective, own: Tensor, columns: int) -> Tensor:
    """[T, columns] of all ranks from each one's [T, ...]."""
    if not len(own):
        return own.new_empty(0, columns)
    width = widest_share(collective.size, columns)
    if own.shape[1] < width:  # the last rank's
        own = F.pad(own, (0, width - own.shape[1]))
    found = collective.parts(own.contiguous()).transpose(0, 1).reshape(len(own), -1)
    return found if found.shape[1] == columns else found[:, :columns].contiguous()


def _every(step: StepInput) -> GroupedInput:
    return step


def _own(w: LinearWeight) -> LinearWeight:
    return w.weight if isinstance(w, OwnColumns) else w


def _columns(w: LinearWeight) -> int:
    if not isinstance(w, OwnColumns):
        raise ValueError("a product that is gathered has to tell the number of all its columns")
    return w.whole
