"""The pool's layout and what the kernels refuse or leave to the reference."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.reference import REFERENCE
from quire_kernels.triton.attention import TritonAttention
from quire_kernels.triton.pool import unsupported
from support.triton_attention import DEVICE, LAYER, Sequences, shape_of

SIZES = (5, 3, 2, 16, 48)  # blocks, layers, heads, page, head_dim


@pytest.mark.parametrize("kv_type", ["auto", "fp8"])
def test_a_blocks_bytes_are_contiguous_and_counted(kv_type):
    ops = TritonAttention(kv_type)
    kv = ops.new_kv(*SIZES, torch.bfloat16, DEVICE)
    assert kv.is_contiguous()
    assert kv.shape[0] == SIZES[0]
    assert not kv.view(torch.uint8).any()
    assert kv.nbytes == SIZES[0] * ops.kv_block_bytes(*SIZES[1:], torch.bfloat16)


def test_an_fp8_pool_takes_half_and_its_scales():
    plain, fp8 = (TritonAttention(kind).kv_block_bytes(*SIZES[1:], torch.bfloat16) for kind in ("auto", "fp8"))
    assert fp8 == plain // 2 + 3 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("head_dim", "page", "dtype", "fp8"),
    [
        (64, 16, torch.float32, False),
        (8, 16, torch.bfloat16, False),
        (520, 16, torch.bfloat16, False),
        (100, 16, torch.bfloat16, False),
        (72, 16, torch.bfloat16, True),
        (64, 6, torch.bfloat16, True),
    ],
)
def test_what_the_kernels_cannot_serve_is_the_references_or_refused(head_dim, page, dtype, fp8):
    assert unsupported(head_dim=head_dim, block_size=page, dtype=dtype, fp8=fp8)
    arguments = (4, 2, 1, page, head_dim, dtype, DEVICE)
    if fp8:
        with pytest.raises(ValueError, match="no fp8 KV pool for this model"):
            TritonAttention("fp8").new_kv(*arguments)
        with pytest.raises(ValueError, match="no fp8 KV pool for this model"):
            TritonAttention("fp8").kv_block_bytes(*arguments[1:-1])
    else:
        assert TritonAttention().new_kv(*arguments).shape == REFERENCE.new_kv(*arguments).shape


def test_the_reference_serves_a_model_of_float32():
    shape = shape_of(4, 2, 32)
    sequences = Sequences([20], shape, torch.float32)
    kv, step = sequences.pool([(0, 10, 10)])
    q = sequences.q[0][10:]
    found = TritonAttention().attention(q, shape, kv, LAYER, step)
    assert torch.equal(found, REFERENCE.attention(q, shape, kv, LAYER, step))


@pytest.mark.parametrize("fp8", [False, True])
def test_a_pool_of_another_model_is_refused(fp8):
    sequences = Sequences([20], shape_of(4, 2, 64))
    kv, step = sequences.pool([(0, 10, 10)], fp8=fp8)
    q = sequences.q[0][10:]
    for shape in (shape_of(4, 2, 32), shape_of(4, 4, 64)):
        with pytest.raises(ValueError, match="kv was made for another model"):
            TritonAttention().attention(q, shape, kv, LAYER, step)
    with pytest.raises(ValueError, match="kv was made for another model"):
        TritonAttention().attention(q, sequences.shape, kv, 3, step)
    with pytest.raises(ValueError, match="not a pool"):
        TritonAttention().attention(q, sequences.shape, kv[:, LAYER], 0, step)
    with pytest.raises(ValueError, match="q must be a contiguous"):
        TritonAttention().attention(q[:5], sequences.shape, kv, LAYER, step)
