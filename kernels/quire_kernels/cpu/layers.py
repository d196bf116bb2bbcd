"""All layers of a model in one call into C++.

Promises: bitwise the results of the ops called one by one; every shape is checked once, when the program is bound. Must
not know: sampling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import Array
from enum import IntEnum
from weakref import WeakSet

import torch
from torch import Tensor

from quire_kernels.cpu.attention import CpuAttention, describe, raise_for
from quire_kernels.cpu.context import Context
from quire_kernels.cpu.experts import experts_args, routing_args
from quire_kernels.cpu.linear import GATES, Epilogue, norm_args
from quire_kernels.cpu.low_rank import BoundAdapter, Product, adapters_args, product_of, products_of
from quire_kernels.cpu.signatures import ExpertsArgs, LayerOpArgs, NormArgs, RoutingArgs, StepAdaptersArgs, StepArgs
from quire_kernels.kernel_set import (
    Attend,
    GateMixed,
    GateWide,
    GroupedInput,
    KeepSampled,
    LayerOp,
    LinearAdd,
    MixExperts,
    Norm,
    NormAdd,
    NormGateUp,
    NormHold,
    NormLinear,
    Project,
    RopeWrite,
    StepAdapters,
    StepInput,
)


class _Kind(IntEnum):
    """`enum class LayerOpKind`."""

    NORM_LINEAR = 0
    ROPE_WRITE = 1
    KEEP_SAMPLED = 2
    ATTEND = 3
    ADD_MIXED = 4
    ADD_WIDE = 5
    PROJECT_MIXED = 6
    PROJECT_WIDE = 7
    NORM_ADD = 8
    ADD_EXPERTS = 9
    MIX_EXPERTS = 10
    GATE_MIXED = 11
    GATE_WIDE = 12
    NORM_HOLD = 13
    NORM_HOLD_ADD = 14
    ADD_HELD = 15
    ADD_WIDE_TO_Y = 16


_PRODUCTS = NormLinear | NormGateUp | LinearAdd | Project
_ADDS = {"mixed": _Kind.ADD_MIXED, "wide": _Kind.ADD_WIDE}
_PROJECTS = {"mixed": _Kind.PROJECT_MIXED, "wide": _Kind.PROJECT_WIDE}


class CpuLayers:
    """The layers of one model, bound to one context."""

    def __init__(self, context: Context, attention: CpuAttention, program: Sequence[LayerOp]) -> None:
        self._context = context  # keeps the workers
        self._attention = attention
        self._program = tuple(program)  # keeps the targets of the addresses below alive
        self._run = context.library.quire_layers
        self._width = _check(self._program, context.num_ranks)
        attends = [op for op in self._program if isinstance(op, Attend)]
        # Of each part of the pool the layer that lies last.
        self._last = {
            part: max((op for op in attends if op.part == part), key=lambda op: op.layer)
            for part in {op.part for op in attends}
        }
        self._sites = dict(_sites(self._program, self._width))
        self._fitting: WeakSet[BoundAdapter] = WeakSet()  # adapters that were checked
        self._num_groups = 1 + max(op.group for op in attends)
        shapes = [op.shape for op in self._program if isinstance(op, RopeWrite | Attend)]
        self._shapes = {id(shape): attention.shape_args(shape) for shape in shapes}  # kept as the program is
        self._norms: list[NormArgs] = []  # kept as the program is
        self._blocks: list[tuple[RoutingArgs, ExpertsArgs]] = []  # likewise
        self._args = (LayerOpArgs * len(self._program))(*map(self._arguments, self._program))

    def __call__(
        self, x: Tensor, kv: Sequence[Tensor], step: StepInput, adapters: StepAdapters | None = None
    ) -> Tensor:
        """x [T, H] -> the sampled rows [S, H] after all layers; x's memory is reused."""
        if x.dtype != torch.bfloat16 or x.shape != (step.positions.shape[0], self._width) or not x.is_contiguous():
            raise ValueError(f"x must be contiguous bfloat16 [{step.positions.shape[0]}, {self._width}]")
        sampled = None if step.sampled is None else self._describe(step.sampled)
        if sampled is not None:
            _check_rows(step.sample_rows, sampled[0].rows, x.shape[0])
        pools = self._attention.parts_args(kv, {part: (op.shape, op.layer) for part, op in self._last.items()})
        failed = self._run(
            self._context.handle,
            self._args,
            len(self._program),
            pools,
            self._describe(step),
            sampled,
            None if sampled is None else step.sample_rows.data_ptr(),
            None if adapters is None else ctypes.byref(self._adapters(adapters, x.shape[0])),
            x.data_ptr(),
        )
        raise_for(failed)
        return x if sampled is None else x[: sampled[0].rows]

    def _adapters(self, adapters: StepAdapters, rows: int) -> StepAdaptersArgs:
        for adapter in adapters.adapters:
            if adapter not in self._fitting:
                adapter.check(self._sites)
                self._fitting.add(adapter)
        return adapters_args(adapters.slots, adapters.adapters, rows)

    def _describe(self, step: GroupedInput) -> Array[StepArgs]:
        """The step as each group of layers sees it."""
        if step.num_groups != self._num_groups:
            raise ValueError(f"the step has tables of {step.num_groups} groups of layers, not {self._num_groups}")
        found = [describe(step.in_group(group)) for group in range(self._num_groups)]
        steps = (StepArgs * self._num_groups)(*found)
        steps.kept = found  # type: ignore[attr-defined] # their tensors
        return steps

    def _arguments(self, op: LayerOp) -> LayerOpArgs:
        args: dict[str, object] = {}
        match op:
            case NormLinear() | NormGateUp():
                epilogue = GATES[op.activation] if isinstance(op, NormGateUp) else Epilogue.STORE
                norm = None if op.norm is None else self._norm(op.norm)
                args = {"kind": _Kind.NORM_LINEAR, "epilogue": epilogue, "weight": op.weight.address, "norm": norm}
            case RopeWrite():
                shape, rope = ctypes.addressof(self._shapes[id(op.shape)]), op.rope
                args = {"kind": _Kind.ROPE_WRITE, "attention": shape}
                args |= {"group": op.group, "part": op.part, "layer": op.layer}
                args |= {"rope": rope.data_ptr(), "rope_rows": rope.shape[0]}
            case KeepSampled():
                args = {"kind": _Kind.KEEP_SAMPLED}
            case Attend():
                shape = ctypes.addressof(self._shapes[id(op.shape)])
                args = {"kind": _Kind.ATTEND, "attention": shape}
                args |= {"group": op.group, "part": op.part, "layer": op.layer}
            case GateMixed():
                norm = None if op.norm is None else self._norm(op.norm)
                args = {"kind": _Kind.GATE_MIXED, "weight": op.weight.address, "norm": norm}
            case LinearAdd():
                kind = _ADDS[op.source] if op.to == "x" else _Kind.ADD_WIDE_TO_Y
                args = {"kind": kind, "weight": op.weight.address, "scale": op.scale}
            case Project():
                args = {"kind": _PROJECTS[op.source], "weight": op.weight.address}
            case NormAdd():
                kind = _Kind.NORM_ADD if op.source == "y" else _Kind.ADD_HELD
                args = {"kind": kind, "norm": self._norm(op.norm), "scale": op.scale}
            case NormHold():
                kind = _Kind.NORM_HOLD_ADD if op.adds else _Kind.NORM_HOLD
                args = {"kind": kind, "norm": self._norm(op.norm)}
            case GateWide():
                norm = None if op.norm is None else self._norm(op.norm)
                args = {"kind": _Kind.GATE_WIDE, "weight": op.weight.address, "norm": norm}
            case MixExperts():
                block = routing_args(op.routing, op.experts.count, self._width), experts_args(op.experts, self._width)
                self._blocks.append(block)
                kind = _Kind.ADD_EXPERTS if op.to == "x" else _Kind.MIX_EXPERTS
                args = {"kind": kind, "scale": op.scale, "norm": None if op.norm is None else self._norm(op.norm)}
                args |= {"routing": ctypes.addressof(block[0]), "experts": ctypes.addressof(block[1])}
        site = getattr(op, "site", None)
        return LayerOpArgs(**args, site=-1 if site is None else site)

    def _norm(self, norm: Norm) -> int:
        """Keep a norm's arguments, and return their address for C++."""
        self._norms.append(norm_args(norm, self._width))
        return ctypes.addressof(self._norms[-1])


def _sites(program: Sequence[LayerOp], width: int) -> Iterator[tuple[int, Product]]:
    """The products that adapters add to, by site."""
    for op in program:
        if isinstance(op, MixExperts) and op.site is not None:
            yield from enumerate(products_of(op.experts, width), op.site)
        elif isinstance(op, _PRODUCTS) and op.site is not None:
            yield op.site, product_of(op.weight)


def _check(program: Sequence[LayerOp], num_ranks: int) -> int:
    """The width of x. ValueError if an op does not fit the rows that those before it leave."""
    first = program[0]
    if not isinstance(first, NormLinear):
        raise ValueError("a layer program begins with a projection")
    width: int = first.weight.num_inputs
    widths = {"x": width, "wide": 0, "q": 0, "mixed": 0}
    for op in program:
        if any(found != wanted for found, wanted in _sizes(op, widths, num_ranks)):
            raise ValueError(f"the sizes of a layer do not fit together: {type(op).__name__} after rows of {widths}")
    return width


def _sizes(op: LayerOp, widths: dict[str, int], num_ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs of sizes that have to be equal; `widths` becomes what the op leaves."""
    match op:
        case NormLinear() | NormGateUp():
            yield op.weight.num_inputs, widths["x"]
            yield op.weight.gate_up, isinstance(op, NormGateUp)
            widths["wide"] = op.weight.num_outputs
        case RopeWrite():
            if op.rope.dtype != torch.float32 or not op.rope.is_contiguous():
                raise ValueError("rope must be contiguous float32")
            heads, queries = widths["wide"] // op.shape.head_dim, op.shape.num_heads * num_ranks
            kv_heads = (heads - queries) // 2  # of all ranks, several of which may have the same ones
            yield widths["wide"], (queries + 2 * kv_heads) * op.shape.head_dim
            yield max(1, kv_heads // num_ranks), op.shape.num_kv_heads
            yield op.rope.shape[1], op.shape.head_dim
            widths["q"] = op.shape.num_heads * op.shape.head_dim
        case Attend():
            yield widths["q"], op.shape.num_heads * op.shape.head_dim
            widths["mixed"] = widths["q"] * num_ranks
        case GateMixed():
            yield op.weight.num_inputs, widths["x"]
            yield op.weight.gate_up, False
            yield op.weight.num_outputs, widths["mixed"]
        case LinearAdd() | Project():
            if isinstance(op, LinearAdd) and op.to == "y" and op.source != "wide":
                raise ValueError("what is added to y is a projection of wide")
            yield op.weight.num_inputs, widths[op.source]
            yield op.weight.num_outputs, widths["x"]
        case GateWide():
            yield op.weight.num_inputs, widths["x"]
            yield op.weight.gate_up, False
            yield op.weight.num_outputs, 1
        case (
            KeepSampled() | NormAdd() | NormHold() | MixExperts()
        ):  # the sizes of experts are checked where they become arguments
            pass


def _check_rows(rows: Tensor, count: int, limit: int) -> None:
    """C++ gathers these rows without a check of its own."""
    if rows.dtype != torch.int64 or rows.shape != (count,) or not rows.is_contiguous():
        raise ValueError(f"sample_rows must be contiguous int64 [{count}]")
    if count and (rows[0] < 0 or rows[-1] >= limit or bool((rows.diff() <= 0).any())):
        raise ValueError(f"sample_rows must rise within the step's {limit} rows")
