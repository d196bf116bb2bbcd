"""Norms, rotation and the write into the pool, against the reference's, and what fp8 pools hold."""

from __future__ import annotations

import math

import pytest
import torch

from quire_kernels.kernel_set import PoolPart
from quire_kernels.reference import REFERENCE
from quire_kernels.triton.attention import TritonAttention
from support.model_steps import step_at
from support.triton_attention import DEVICE, LAYER, NUM_LAYERS, as_e4m3, shape_of

ROPE_ROWS = 50


def _inputs(shape, dtype, *, rows=5, page=16, num_blocks=4, seed=0):
    """Rows at shuffled positions for shuffled slots, angles, and the reference's pool, full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(rows, width, generator=generator).to(DEVICE, dtype)
    angles = torch.rand(ROPE_ROWS, shape.head_dim // 2, generator=generator) * 7
    rope = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)
    slots = torch.randperm(num_blocks * page, generator=generator)[:rows].tolist()
    positions = torch.randperm(ROPE_ROWS, generator=generator)[:rows].tolist()
    sizes = (num_blocks, NUM_LAYERS, shape.num_kv_heads, page, shape.head_dim)
    kv = REFERENCE.new_kv(*sizes, dtype, DEVICE).fill_(math.nan)
    return qkv, rope, kv, step_at(slots, positions, DEVICE)


def _norms(head_dim, dtype, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(head_dim, generator=generator).to(DEVICE, dtype) for name in ("q_norm", "k_norm")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page"), [(4, 2, 32, 16), (5, 1, 80, 48), (32, 4, 64, 16), (2, 1, 512, 32)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_is_the_references(*, heads, kv_heads, head_dim, page, dtype, normed):
    """The written slots and the queries, within a rounding or two; every other number of the pool is left alone."""
    shape = shape_of(heads, kv_heads, head_dim, **(_norms(head_dim, dtype) if normed else {}))
    qkv, rope, wanted, step = _inputs(shape, dtype, page=page)
    kv = wanted.clone()
    q = TritonAttention().rope_write(qkv, rope, shape, kv, LAYER, step)
    expected = REFERENCE.rope_write(qkv, rope, shape, wanted, LAYER, step)
    close = 8e-3 if dtype == torch.bfloat16 else 1e-3
    assert torch.allclose(q.float(), expected.float(), rtol=2 * close, atol=close)
    assert torch.allclose(kv.float(), wanted.float(), rtol=2 * close, atol=close, equal_nan=True)
    assert (q == expected).float().mean() > 0.99


def test_one_norm_without_the_other():
    norms = _norms(32, torch.bfloat16)
    for name in norms:
        shape = shape_of(4, 2, 32, **{name: norms[name]})
        qkv, rope, wanted, step = _inputs(shape, torch.bfloat16)
        kv = wanted.clone()
        q = TritonAttention().rope_write(qkv, rope, shape, kv, LAYER, step)
        expected = REFERENCE.rope_write(qkv, rope, shape, wanted, LAYER, step)
        assert torch.allclose(q.float(), expected.float(), rtol=2e-2, atol=1e-2)
        assert torch.allclose(kv.float(), wanted.float(), rtol=2e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize(
    "norms",
    [
        pytest.param({name: norm.float() for name, norm in _norms(32, torch.float32).items()}, id="wide"),
        pytest.param(
            {"q_norm": _norms(128, torch.bfloat16)["q_norm"], "k_norm": _norms(64, torch.bfloat16)["k_norm"]}, id="row"
        ),
        pytest.param({"v_norm": True, **_norms(32, torch.bfloat16)}, id="values"),
    ],
)
def test_norms_of_other_kinds(norms):
    """With float32 weights, of all heads of a row together, and of values, into a part of larger blocks."""
    shape = shape_of(4, 2, 32, **norms)
    qkv, rope, wanted, step = _inputs(shape, torch.bfloat16)
    larger = REFERENCE.new_kv(len(wanted), NUM_LAYERS + 1, 2, 16, 32, torch.bfloat16, DEVICE).fill_(math.nan)
    kv = TritonAttention().kv_part(larger, (2, 32), PoolPart(NUM_LAYERS, 2, 32, (PoolPart(1, 2, 32),)))
    q = TritonAttention().rope_write(qkv.clone(), rope, shape, kv, LAYER, step)
    expected = REFERENCE.rope_write(qkv, rope, shape, wanted, LAYER, step)
    assert torch.allclose(q.float(), expected.float(), rtol=2e-2, atol=1e-2)
    assert torch.allclose(kv.float(), wanted.float(), rtol=2e-2, atol=1e-2, equal_nan=True)
    assert larger[:, 0].isnan().all()


def test_a_row_is_the_same_alone():
    shape = shape_of(4, 2, 64, **_norms(64, torch.bfloat16))
    qkv, rope, kv, step = _inputs(shape, torch.bfloat16)
    q = TritonAttention().rope_write(qkv, rope, shape, kv, LAYER, step)
    alone = kv.clone().fill_(math.nan)
    for row in range(len(qkv)):
        one = step_at(step.kv_slots[row : row + 1].tolist(), step.positions[row : row + 1].tolist(), DEVICE)
        assert torch.equal(TritonAttention().rope_write(qkv[row : row + 1], rope, shape, alone, LAYER, one)[0], q[row])
    assert torch.equal(alone.view(torch.int16), kv.view(torch.int16))


@pytest.mark.parametrize(("head_dim", "page"), [(32, 16), (80, 4), (128, 48)])
def test_an_fp8_pool_holds_the_same_keys_and_values_scaled(head_dim, page):
    """Bit for bit the conversion of what a pool of bf16 would hold; bytes of other slots are left alone."""
    shape = shape_of(4, 2, head_dim)
    qkv, rope, plain, step = _inputs(shape, torch.bfloat16, page=page, num_blocks=6)
    qkv[1] = 0  # a scale of 0
    qkv[2] *= 1e-4
    ops = TritonAttention("fp8")
    kv = ops.new_kv(6, NUM_LAYERS, 2, page, head_dim, torch.bfloat16, DEVICE)
    kv.fill_(0xAB)
    wanted = kv.clone()
    q = ops.rope_write(qkv, rope, shape, kv, LAYER, step)
    assert torch.equal(q, TritonAttention().rope_write(qkv, rope, shape, plain, LAYER, step))
    for slot in step.kv_slots.tolist():
        block, offset = divmod(slot, page)
        for half in range(2):
            bits, scales = as_e4m3(plain[block, LAYER, half, :, offset])
            heads = wanted[block, LAYER, half]
            heads[:, offset * head_dim : (offset + 1) * head_dim] = bits
            at = page * head_dim + 4 * offset
            heads[:, at : at + 4] = scales.unsqueeze(-1).view(torch.uint8)
    assert torch.equal(kv, wanted)


def test_numbers_that_are_not_finite_reach_the_scale():
    shape = shape_of(2, 2, 32)
    qkv, rope, _, step = _inputs(shape, torch.bfloat16)
    qkv[0, -1], qkv[1, -1] = math.nan, math.inf
    ops = TritonAttention("fp8")
    kv = ops.new_kv(4, NUM_LAYERS, 2, 16, 32, torch.bfloat16, DEVICE)
    ops.rope_write(qkv, rope, shape, kv, LAYER, step)
    scales = kv[:, LAYER, 1, :, 16 * 32 :].view(torch.float32)  # [blocks, heads, page]
    blocks, offsets = step.kv_slots // 16, step.kv_slots % 16
    found = scales[blocks, :, offsets]  # [rows, heads]
    assert found.isfinite().tolist() == [[True, False]] * 2 + [[True, True]] * 3
