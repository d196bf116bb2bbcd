"""The layout of the KV pool: [blocks, layers, 2 (K, V), kv_heads, block_size, head_dim].

Promises: a block's bytes over all layers are contiguous; so are the bytes of a (head, block).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire_kernels.kernel_set import PoolPart


def new_kv(  # noqa: PLR0917 - the op's contract
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    # Zeroed pages cost nothing until touched: the operating system commits them on the first write.
    return torch.zeros(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)


def kv_block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize


def kv_part(kv: Tensor, heads: tuple[int, int], part: PoolPart) -> Tensor:
    """See `KernelSet`: [blocks, layers, 2, kv_heads, block_size, head_dim], blocks apart as in the pool."""
    del heads
    block_size = kv.shape[4]

    def sizes(some: PoolPart) -> tuple[int, ...]:
        return (some.num_layers, 2, some.num_kv_heads, block_size, some.head_dim)

    first = sum(math.prod(sizes(other)) for other in part.before)
    return kv.flatten(1)[:, first : first + math.prod(sizes(part))].view(-1, *sizes(part))


def write_kv(kv: Tensor, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store keys and values [T, Hkv, D] of one layer in the slots [T]. No two rows may share a slot."""
    block_size = kv.shape[4]
    blocks, offsets = slots // block_size, slots % block_size
    kv[blocks, layer, 0, :, offsets] = keys
    kv[blocks, layer, 1, :, offsets] = values


def read_kv(kv: Tensor, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the blocks in tables [n, b], in order: two float32 [n, Hkv, b * block_size, D]."""
    _, _, _, num_heads, block_size, head_dim = kv.shape
    n, per_table = tables.shape
    found = kv[:, layer].index_select(0, tables.long().view(-1))  # copies whole runs of (K, V)
    wide = torch.empty(2, n, num_heads, per_table, block_size, head_dim, dtype=torch.float32, device=kv.device)
    wide.copy_(found.view(n, per_table, 2, num_heads, block_size, head_dim).permute(2, 0, 3, 1, 4, 5))
    keys, values = wide.view(2, n, num_heads, per_table * block_size, head_dim)
    return keys, values
