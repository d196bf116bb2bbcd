"""Copies of blocks of either pool, byte for byte."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.triton.attention import TritonAttention
from quire_kernels.triton.copy_blocks import copy_blocks
from support.triton_attention import DEVICE


def _pool(kv_type, num_kv_heads=2, page=16, head_dim=80):
    kv = TritonAttention(kv_type).new_kv(9, 3, num_kv_heads, page, head_dim, torch.bfloat16, DEVICE)
    generator = torch.Generator().manual_seed(0)
    kv.view(torch.uint8).copy_(torch.randint(0, 256, kv.view(torch.uint8).shape, generator=generator))
    return kv


@pytest.mark.parametrize("kv_type", ["auto", "fp8"])
@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(3, 5)],
        [(0, 8), (0, 1), (4, 7)],
        [(1, 2), (2, 3), (5, 5)],  # sources are read before targets are written
        [(6, 4), (4, 6)],
    ],
)
def test_copies_are_the_references(kv_type, pairs):
    kv = _pool(kv_type)
    wanted = kv.clone()
    for source, target in pairs:
        wanted[target] = kv[source]
    copy_blocks(kv, pairs)
    assert torch.equal(kv.view(torch.uint8), wanted.view(torch.uint8))


def test_a_block_of_many_chunks():
    kv = _pool("auto", num_kv_heads=4, page=48, head_dim=72)
    wanted = kv.clone()
    wanted[2] = kv[7]
    copy_blocks(kv, [(7, 2)])
    assert torch.equal(kv.view(torch.uint8), wanted.view(torch.uint8))
