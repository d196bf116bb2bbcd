"""Compares a set's fused layers with its own single ops, bitwise.

Promises: two layers with every option; the mixed step asks for some of its rows. Must not know: models, the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_kernels.kernel_set import AttentionInput, AttentionShape, KernelSet, LinearWeight
from quire_kernels.verify.findings import Check, Outcome, Subject, same, together
from quire_kernels.verify.heads import Heads
from quire_kernels.verify.operands import Source
from quire_kernels.verify.steps import Slice, Step, Tables

_EPS = 1e-6
_LENGTHS = (70, 1, 40, 17)
_PARTS = ((0, 30, 40), (1, 0, 1), (2, 39, 1), (3, 0, 17))  # sequence, start, rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: Tensor
    qkv: LinearWeight
    attention: AttentionShape
    o: LinearWeight
    mlp_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight


def layers_check(subject: Subject, heads: Heads, *, hidden: int, inner: int) -> Check:
    """The check for a set that has `bind_layers`."""

    def run() -> Outcome:
        kernels, device = subject.kernels, subject.device
        assert kernels.bind_layers is not None
        source = Source(hidden)
        layers = [_layer(subject, heads, source, hidden, inner) for _ in range(2)]
        tables = Tables(_LENGTHS, heads.block_size)
        width = heads.head_dim
        angles = source.normal(max(_LENGTHS), width // 2)
        rope = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
        sizes = (tables.num_blocks, len(layers), heads.num_kv_heads, heads.block_size, width)
        pools = [kernels.new_kv(*sizes, subject.dtype, device) for _ in range(2)]
        history = tables.step([Slice(s, 0, start) for s, start, _ in _PARTS if start], device)
        step = tables.step([Slice(*part) for part in _PARTS], device)
        whole = replace(step, sample_rows=torch.arange(len(step.positions), device=device), sampled=None)
        outcomes = []
        bound = kernels.bind_layers(layers, rope, _EPS)
        for name, each in (("the prompts", history), ("a mixed step", step), ("all rows of a step", whole)):
            x = source.normal(len(each.positions), hidden).to(device, subject.dtype)
            wanted = _one_by_one(kernels, (layers, rope), x.clone(), pools[0], each)
            outcomes.append(same(bound(x.clone(), pools[1], each), wanted, name))
        outcomes.append(same(pools[1], pools[0], "the pool"))
        return together(*outcomes)

    return Check(op="bind_layers", case=f"two layers, {heads}", run=run)


def _layer(subject: Subject, heads: Heads, source: Source, hidden: int, inner: int) -> _Layer:
    kernels, device, dtype, width = subject.kernels, subject.device, subject.dtype, heads.head_dim

    def matrix(outputs: int, inputs: int) -> Tensor:
        return source.normal(outputs, inputs).div(math.sqrt(inputs)).to(device, dtype)

    def vector(size: int) -> Tensor:
        return (1 + 0.2 * source.normal(size)).to(device, dtype)

    projected = (heads.num_heads + 2 * heads.num_kv_heads) * width
    return _Layer(
        attention_norm=vector(hidden),
        qkv=kernels.pack_linear(matrix(projected, hidden), vector(projected)),
        attention=AttentionShape(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=width,
            scale=width**-0.5,
            window=33,
            q_norm=vector(width),
            k_norm=vector(width),
            norm_eps=_EPS,
        ),
        o=kernels.pack_linear(matrix(hidden, heads.num_heads * width), None),
        mlp_norm=vector(hidden),
        gate_up=kernels.pack_gate_up(matrix(inner, hidden), matrix(inner, hidden), vector(2 * inner)),
        down=kernels.pack_linear(matrix(hidden, inner), vector(hidden)),
    )


def _one_by_one(ops: KernelSet, model: tuple[list[_Layer], Tensor], x: Tensor, kv: Tensor, step: Step) -> Tensor:
    """The layers by single ops, called in the model's order."""
    layers, rope = model
    rows: AttentionInput = step
    for index, layer in enumerate(layers):
        qkv = ops.norm_linear(x, layer.attention_norm, _EPS, layer.qkv)
        q = ops.rope_write(qkv, rope, layer.attention, kv, index, step)
        if index == len(layers) - 1 and step.sampled is not None:
            q, x, rows = q[step.sample_rows], x[step.sample_rows], step.sampled
        x = ops.linear_add(ops.attention(q, layer.attention, kv, index, rows), layer.o, x)
        x = ops.linear_add(ops.norm_gate_up(x, layer.mlp_norm, _EPS, layer.gate_up), layer.down, x)
    return x
