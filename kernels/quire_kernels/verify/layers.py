"""Compares a set's bound layers with its own single ops, bitwise; and its layers of decodes, by what roundings cost.

Promises: two layers with every option; the mixed step asks for some of its rows. Must not know: models, the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quire_kernels.kernel_set import (
    Attend,
    AttentionShape,
    ExpertMatrices,
    GateMixed,
    GateWide,
    KeepSampled,
    KernelSet,
    LayerOp,
    LinearAdd,
    MixExperts,
    Norm,
    NormAdd,
    NormGateUp,
    NormHold,
    NormLinear,
    RopeWrite,
    Routing,
    expert_rows,
)
from quire_kernels.layer_program import run_layers
from quire_kernels.reference import REFERENCE
from quire_kernels.verify.findings import Check, Outcome, Subject, compared_alone, same, together
from quire_kernels.verify.heads import Heads
from quire_kernels.verify.operands import Source
from quire_kernels.verify.steps import Slice, Tables

_EPS = 1e-6
Capture = Callable[[Callable[[], None]], Callable[[], None]]  # of work on the device: what replays it, waited for
_LENGTHS = (70, 1, 40, 17)
# Of decodes: two parts of keys and one, and enough rows for every tile.
_DECODED = (300, 33, 1, *range(2, 32))
_MOST_OFF = 3.0  # times what the same roundings cost in single ops
_PARTS = ((0, 30, 40), (1, 0, 1), (2, 39, 1), (3, 0, 17))  # sequence, start, rows


def layers_check(subject: Subject, heads: Heads, *, hidden: int, inner: int) -> Check:
    """The check for a set that has `bind_layers`."""

    def run() -> Outcome:
        kernels, device = subject.kernels, subject.device
        assert kernels.bind_layers is not None
        source = Source(hidden)
        width = heads.head_dim
        angles = source.normal(max(_LENGTHS), width // 2)
        rope = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
        sizes = (subject, heads, source, rope, hidden, inner)
        program = [op for index in range(2) for op in _layer(*sizes, index=index, last=index == 1)]
        tables = Tables(_LENGTHS, heads.block_size)
        pool = (tables.num_blocks, 2, heads.num_kv_heads, heads.block_size, width)
        pools = [kernels.new_kv(*pool, subject.dtype, device) for _ in range(2)]
        history = tables.step([Slice(s, 0, start) for s, start, _ in _PARTS if start], device)
        step = tables.step([Slice(*part) for part in _PARTS], device)
        whole = replace(step, sample_rows=torch.arange(len(step.positions), device=device), sampled=None)
        outcomes = []
        bound = kernels.bind_layers(program)
        for name, each in (("the prompts", history), ("a mixed step", step), ("all rows of a step", whole)):
            x = source.normal(len(each.positions), hidden).to(device, subject.dtype)
            wanted = run_layers(kernels, program, x.clone(), pools[:1], each)
            outcomes.append(same(bound(x.clone(), pools[1:], each), wanted, name))
        outcomes.append(same(pools[1], pools[0], "the pool"))
        return together(*outcomes)

    return Check(op="bind_layers", case=f"two layers, {heads}", run=run)


def _layer(  # noqa: PLR0917 - the sizes of a layer
    subject: Subject, heads: Heads, source: Source, rope: Tensor, hidden: int, inner: int, *, index: int, last: bool
) -> Iterator[LayerOp]:
    kernels, device, dtype, width = subject.kernels, subject.device, subject.dtype, heads.head_dim

    def matrix(outputs: int, inputs: int) -> Tensor:
        return source.normal(outputs, inputs).div(math.sqrt(inputs)).to(device, dtype)

    def vector(size: int) -> Tensor:
        return (1 + 0.2 * source.normal(size)).to(device, dtype)

    projected = (heads.num_heads + 2 * heads.num_kv_heads) * width
    qkv = kernels.pack_linear(matrix(projected, hidden), vector(projected))
    yield NormLinear(norm=Norm(vector(hidden), _EPS), weight=qkv)
    shape = AttentionShape(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=width,
        scale=width**-0.5,
        window=33,
        q_norm=vector(width),
        k_norm=vector(width),
        norm_eps=_EPS,
    )
    yield RopeWrite(shape=shape, rope=rope, layer=index)
    if last:
        yield KeepSampled()
    yield Attend(shape=shape, layer=index)
    yield GateMixed(norm=None, weight=kernels.pack_linear(matrix(heads.num_heads * width, hidden), None))
    yield LinearAdd(source="mixed", weight=kernels.pack_linear(matrix(hidden, heads.num_heads * width), None))
    if not last and kernels.pack_router is not None:
        few, count = min(inner, 64), 3
        above = (count * expert_rows(few), hidden)
        experts = ExpertMatrices(
            count=count,
            inner=few,
            gate_up=kernels.pack_gate_up(matrix(*above), matrix(*above), None),
            down=kernels.pack_linear(matrix(count * expert_rows(hidden), few), None),
            activation="silu",
        )
        routing = Routing(weight=kernels.pack_router(matrix(count, hidden), None), top_k=2)
        yield MixExperts(norm=Norm(vector(hidden), _EPS), routing=routing, experts=experts)
        yield MixExperts(norm=None, routing=routing, experts=experts, to="y")
        yield NormAdd(norm=Norm(vector(hidden), _EPS))
        yield NormHold(norm=Norm(vector(hidden), _EPS))
        yield MixExperts(norm=None, routing=replace(routing, norm=Norm(vector(hidden), _EPS)), experts=experts, to="y")
        yield NormHold(norm=Norm(vector(hidden), _EPS), adds=True)
        yield NormAdd(norm=Norm(vector(hidden), _EPS), scale=0.75, source="held")
    gate_up = kernels.pack_gate_up(matrix(inner, hidden), matrix(inner, hidden), vector(2 * inner))
    yield NormGateUp(norm=Norm(vector(hidden), _EPS), weight=gate_up, activation="silu")
    if not last and kernels.pack_router is not None and kernels.gate_rows is not None:
        yield GateWide(norm=Norm(vector(hidden), _EPS), weight=kernels.pack_router(matrix(1, hidden), None))
    yield LinearAdd(source="wide", weight=kernels.pack_linear(matrix(hidden, inner), vector(hidden)))


def decodes_check(subject: Subject, heads: Heads, *, hidden: int, inner: int) -> Check:
    """The check for a set that has `bind_decodes`.

    Its rows may be as far from those in float32 as the set's own single ops are, by their norm, and a little further: a
    rounding moves either by as much, in another direction. Rows alone are compared with the batch.
    """

    def run() -> Outcome:
        kernels, device, dtype = subject.kernels, subject.device, subject.dtype
        assert kernels.bind_decodes is not None
        tables = Tables(_DECODED, heads.block_size)
        pool = (tables.num_blocks, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
        history = tables.step([Slice(s, 0, n - 1) for s, n in enumerate(_DECODED) if n > 1], device)
        rows = [Slice(s, n - 1, 1) for s, n in enumerate(_DECODED)]
        each = replace(tables.step(rows, device), sampled=None)
        known = Source(hidden).normal(len(history.positions), hidden).to(device, dtype)
        x = Source(inner).normal(len(rows), hidden).to(device, dtype)

        def by(ops: KernelSet, kind: torch.dtype) -> tuple[Tensor, Tensor, list[LayerOp]]:
            program = list(_plain_layers(ops, heads, dtype, kind, device, hidden=hidden, inner=inner))
            kv = ops.new_kv(*pool, kind, device)
            run_layers(ops, program, known.to(kind, copy=True), [kv], history)
            before = kv.clone()
            return run_layers(ops, program, x.to(kind, copy=True), [kv], each), before, program

        exact, _, _ = by(REFERENCE, torch.float32)
        single, kv, program = by(kernels, dtype)
        chain = kernels.bind_decodes(program)
        if chain is None:
            return Outcome()
        found = chain(x.clone(), [kv.clone()], each)
        if found is None:
            return Outcome(problem="a step of decodes was refused")
        allowed = _MOST_OFF * float((single.float() - exact).norm())
        off = float((found.float() - exact).norm())
        share = 0.0 if off == 0 else off / allowed if allowed else math.inf
        if not off <= allowed:
            return Outcome(share=share, problem=f"the rows are off by {off:.3g}, and {allowed:.3g} are allowed")
        outcomes = [Outcome(share=share)]
        for at, row in enumerate(rows[:4]):
            alone = chain(x[at : at + 1].clone(), [kv.clone()], replace(tables.step([row], device), sampled=None))
            equal = alone is not None and torch.equal(alone, found[at : at + 1])
            outcomes.append(compared_alone(equal, subject, f"row {at}"))
        return together(*outcomes)

    return Check(op="bind_decodes", case=f"two layers of decodes, {heads}", run=run)


def replay_check(subject: Subject, heads: Heads, capture: Capture, *, hidden: int, inner: int) -> Check:
    """The check of graphs: two layers of decodes, replayed on other rows than those of the capture, bit for bit."""

    def run() -> Outcome:
        kernels, device, dtype = subject.kernels, subject.device, subject.dtype
        tables = Tables(_DECODED, heads.block_size)
        pool = (tables.num_blocks, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
        each = replace(tables.step([Slice(s, n - 1, 1) for s, n in enumerate(_DECODED)], device), sampled=None)
        program = list(_plain_layers(kernels, heads, dtype, dtype, device, hidden=hidden, inner=inner))
        given = [Source(inner + turn).normal(len(_DECODED), hidden).to(device, dtype) for turn in range(3)]
        kv = [kernels.new_kv(*pool, dtype, device) for _ in range(2)]
        x, out = given[0].clone(), torch.empty_like(given[0])

        def body() -> None:
            out.copy_(run_layers(kernels, program, x.clone(), kv[:1], each))

        run_layers(kernels, program, x.clone(), kv[:1], each)  # kernels are compiled
        graph = capture(body)
        outcomes = []
        for turn, rows in enumerate(given):
            x.copy_(rows)
            out.zero_()
            graph()
            wanted = run_layers(kernels, program, rows.clone(), kv[1:], each)
            outcomes.append(same(out, wanted, f"replay {turn + 1}"))
        outcomes.append(same(kv[0], kv[1], "the pool"))
        return together(*outcomes)

    return Check(op="graphs", case=f"two layers of decodes, {heads}", run=run)


def _plain_layers(
    ops: KernelSet,
    heads: Heads,
    rounded: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    *,
    hidden: int,
    inner: int,
) -> Iterator[LayerOp]:
    """Two layers of numbers that are exact in the type `rounded`, in the type `dtype`."""
    source, width = Source(hidden + inner), heads.head_dim

    def matrix(outputs: int, inputs: int) -> Tensor:
        return source.normal(outputs, inputs).div(math.sqrt(inputs)).to(device, rounded).to(dtype)

    def vector(size: int) -> Tensor:
        return (1 + 0.2 * source.normal(size)).to(device, rounded).to(dtype)

    angles = source.normal(max(_DECODED), width // 2)
    rope = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    projected = heads.num_heads * width
    for layer in range(2):
        shape = AttentionShape(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=width,
            scale=width**-0.5,
            window=heads.window,
            q_norm=vector(width) if heads.norms else None,
            k_norm=vector(width) if heads.norms else None,
            norm_eps=_EPS,
        )
        total = projected + 2 * heads.num_kv_heads * width
        yield NormLinear(norm=Norm(vector(hidden), _EPS), weight=ops.pack_linear(matrix(total, hidden), vector(total)))
        yield RopeWrite(shape=shape, rope=rope, layer=layer)
        yield Attend(shape=shape, layer=layer)
        yield LinearAdd(source="mixed", weight=ops.pack_linear(matrix(hidden, projected), None))
        gate_up = ops.pack_gate_up(matrix(inner, hidden), matrix(inner, hidden), None)
        yield NormGateUp(norm=Norm(vector(hidden), _EPS), weight=gate_up, activation="silu")
        yield LinearAdd(source="wide", weight=ops.pack_linear(matrix(hidden, inner), None))
