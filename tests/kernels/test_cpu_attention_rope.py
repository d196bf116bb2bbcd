"""The C++ `rope_write`, for every instruction set of this CPU: norms, rotation, and what ends up in the pool."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.cpu.variants import usable_variants
from quire_kernels.reference import REFERENCE
from support.cpu_attention import CPU, KV_TYPES, LAYER, NUM_LAYERS, Kernels, shape_of
from support.model_steps import batch_of, input_of, scheduled, step_at

POSITIONS = 90


@pytest.fixture(scope="module", params=usable_variants(), ids=lambda variant: variant.name)
def variant(request):
    return request.param


@pytest.fixture(scope="module", params=KV_TYPES)
def kernels(request, variant):
    return Kernels(variant, threads=2, kv_type=request.param)


def case(rows, heads, kv_heads, head_dim, *, normed, seed=0):
    """Random rows at random positions in random slots of a pool of 8 blocks."""
    generator = torch.Generator().manual_seed(seed)
    norms = {}
    if normed:
        norms = {name: (torch.rand(head_dim, generator=generator) + 0.5).bfloat16() for name in ("q_norm", "k_norm")}
    shape = shape_of(heads, kv_heads, head_dim, **norms)
    qkv = (3 * torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=generator)).bfloat16()
    angles = 7 * torch.rand(POSITIONS, head_dim // 2, generator=generator, dtype=torch.float64)
    positions = torch.randint(POSITIONS, (rows,), generator=generator).tolist()
    slots = torch.randperm(8 * 16, generator=generator)[:rows].tolist()
    return shape, qkv, angles, step_at(slots, positions)


def table(angles):
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def turned(x, norm, angles, positions):
    """The definition in float64: x [T, H, D]."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    first, second = x.chunk(2, dim=-1)
    rotation = torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    result = torch.complex(first, second) * rotation
    return torch.cat([result.real, result.imag], dim=-1)


def read_back(kernels, shape, pool, block):
    """The value in a block's first slot, [Hkv, D] float32: a row that sees one position only has it as its result."""
    step = input_of(batch_of(scheduled([0], [block], 0, 1)), 16, CPU)
    q = torch.zeros(1, shape.num_heads, shape.head_dim).bfloat16()
    out = kernels.ops.attention(q, shape, pool, LAYER, step).view(shape.num_kv_heads, -1, shape.head_dim)
    return out[:, 0].float()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 128, 256, 512])
def test_queries_are_normed_and_turned(kernels, head_dim, normed):
    shape, qkv, angles, step = case(13, 5, 1, head_dim, normed=normed)
    pool = kernels.ops.new_kv(8, NUM_LAYERS, 1, 16, head_dim, torch.bfloat16, CPU)
    q = kernels.ops.rope_write(qkv, table(angles), shape, pool, LAYER, step)
    assert q.dtype == torch.bfloat16
    exact = turned(qkv.view(13, -1, head_dim)[:, :5], shape.q_norm, angles, step.positions)
    # One rounding to bf16 and a little of float32.
    assert ((q.double() - exact).abs() <= 2**-8 * exact.abs() * 1.01 + 1e-5).all()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_what_attention_reads_back_is_what_was_written(kernels, head_dim, normed):
    """Rows of 4 sequences written in one call in any order, against the reference ops on the same rows."""
    generator = torch.Generator().manual_seed(1)
    shape, _, angles, _ = case(1, 4, 2, head_dim, normed=normed)
    lengths, blocks = [40, 17, 1, 32], [[5, 2, 7], [1, 3], [4], [6, 8]]
    items = [scheduled([0] * n, table, 0, n) for n, table in zip(lengths, blocks, strict=True)]
    step = input_of(batch_of(*items), 16, CPU)
    qkv = torch.randn(sum(lengths), 8 * head_dim, generator=generator).bfloat16()
    results = []
    for ops in (kernels.ops, REFERENCE):
        pool = ops.new_kv(9, NUM_LAYERS, 2, 16, head_dim, torch.bfloat16, CPU)
        q = ops.rope_write(qkv, table(angles), shape, pool, LAYER, step)
        assert not pool[:, 1 - LAYER].any(), "another layer was written"
        assert not pool[0].any(), "another block was written"
        results.append(ops.attention(q, shape, pool, LAYER, step).float())
    tolerance = 0.02 if kernels.kv_type == "bf16" else 0.04
    assert (results[0] - results[1]).abs().max() <= tolerance * results[1].abs().max()


def test_values_are_stored_as_they_are(kernels):
    shape, qkv, angles, step = case(8, 4, 2, 64, normed=True)
    step = step_at([16 * i for i in range(8)], step.positions.tolist())
    pool = kernels.ops.new_kv(8, NUM_LAYERS, 2, 16, 64, torch.bfloat16, CPU)
    kernels.ops.rope_write(qkv, table(angles), shape, pool, LAYER, step)
    for row in range(8):
        wanted = qkv.view(8, -1, 64)[row, 6:].float()
        error = (read_back(kernels, shape, pool, row) - wanted).abs()
        step_size = wanted.abs().amax(-1, keepdim=True) / 127
        assert (error <= (0 if kernels.kv_type == "bf16" else 0.51 * step_size + 2**-8 * wanted.abs())).all()


def test_every_slot_is_written_alone(kernels):
    """Neighbouring slots of a unit, written one call each or all in one, hold the same bytes."""
    shape, qkv, angles, _ = case(48, 4, 2, 32, normed=True)
    positions = list(range(48))
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3)).tolist()
    pools = [kernels.ops.new_kv(3, NUM_LAYERS, 2, 16, 32, torch.bfloat16, CPU) for _ in range(2)]
    whole = kernels.ops.rope_write(qkv, table(angles), shape, pools[0], LAYER, step_at(slots, positions))
    for row in range(48):
        step = step_at(slots[row : row + 1], positions[row : row + 1])
        q = kernels.ops.rope_write(qkv[row : row + 1], table(angles), shape, pools[1], LAYER, step)
        assert torch.equal(q[0], whole[row])
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))


def test_a_row_does_not_depend_on_the_others(kernels):
    shape, qkv, angles, step = case(70, 3, 1, 48, normed=True)
    pool = kernels.ops.new_kv(8, NUM_LAYERS, 1, 16, 48, torch.bfloat16, CPU)
    whole = kernels.ops.rope_write(qkv, table(angles), shape, pool, LAYER, step)
    for rows in range(1, 70):
        part = step_at(step.kv_slots[-rows:].tolist(), step.positions[-rows:].tolist())
        q = kernels.ops.rope_write(qkv[-rows:], table(angles), shape, pool, LAYER, part)
        assert torch.equal(q, whole[-rows:])
