"""Copies of blocks of either pool, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class _Floats(TorchDispatchMode):
    """Notes the operations that move what a pool holds as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
        if any(tensor.is_floating_point() for tensor in tensors) and "index" in function.name():
            self.moved.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("head_dim", [80, 6])  # 6: blocks that are no whole words
def test_blocks_are_never_moved_as_numbers(head_dim):
    """A GPU in deterministic mode writes other NaNs than it read."""
    kv = torch.zeros(9, 1, 2, 1, 1, head_dim, dtype=torch.bfloat16, device=DEVICE)
    kv[1] = 3.0
    with _Floats() as floats:
        copy_blocks(kv, [(1, 2), (2, 3), (5, 5)])
    assert floats.moved == []
    assert (kv[2] == 3.0).all()
    assert (kv[3] == 0.0).all()
