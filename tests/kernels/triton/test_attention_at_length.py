"""Attention over many shapes and mixed steps drawn at random: for the long run, since a case takes seconds."""

from __future__ import annotations

import random

import pytest
import torch

from quire_kernels.triton.attention import TritonAttention
from support.triton_attention import Sequences, shape_of

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("seed", range(30))
def test_a_mixed_step(seed):
    """Groups of 1 to 16 heads, heads of 32 to 512, pages, windows, types, all tilings, contexts past several parts."""
    source = random.Random(seed)
    group, kv_heads = source.choice((1, 2, 3, 7, 16)), source.choice((1, 2))
    fp8 = source.random() < 0.4
    head_dim = source.choice((32, 64, 80, 96, 128, 256, 512))
    shape = shape_of(group * kv_heads, kv_heads, head_dim, source.choice((None, None, 1, 33, 256, 300)))
    dtype, page = source.choice((torch.bfloat16, torch.float16)), source.choice((16, 32, 48, 64))
    ends = [source.choice((1, 63, 64, 65, 256, 257, 512, source.randint(1, 900))) for _ in range(4)]
    rows = [source.choice((1, 1, 2, 17, source.randint(1, 200))) for _ in ends]
    slices = [
        (i, end - min(end, count), min(end, count)) for i, (end, count) in enumerate(zip(ends, rows, strict=True))
    ]
    deterministic, warp_groups = source.random() < 0.5, source.random() < 0.5
    ops = TritonAttention("fp8" if fp8 else "auto", warp_groups=warp_groups, deterministic=deterministic)
    Sequences(ends, shape, dtype, page=page, seed=seed).check(slices, fp8=fp8, ops=ops)


@pytest.mark.parametrize("seed", range(6))
def test_chunks_of_any_length_are_the_whole(seed):
    """Bit for bit, chunks of one row among them: with `deterministic`, decode computes what prefill does."""
    source = random.Random(seed)
    window, fp8 = source.choice((None, 100)), source.random() < 0.5
    length = source.randint(400, 700)
    sequences = Sequences([length], shape_of(source.choice((2, 3, 8)), 1, 64, window), seed=seed)
    ops = TritonAttention("fp8" if fp8 else "auto", warp_groups=seed % 2 == 0, deterministic=True)
    (whole,) = sequences.attend([(0, 0, length)], fp8=fp8, ops=ops)
    for _ in range(6):
        start = source.randrange(length)
        rows = source.choice((1, min(length - start, source.randint(1, 90))))
        (chunk,) = sequences.attend([(0, start, rows)], fp8=fp8, ops=ops, seed=start)
        assert torch.equal(chunk, whole[start : start + rows]), (start, rows)
