"""The layout of the KV pool: [blocks, layers, 2 (K, V), kv_heads, block_size, head_dim].

Promises: a block's bytes over all layers are contiguous; so are the bytes of a (head, block).
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def write_kv(kv: Tensor, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store keys and values [T, Hkv, D] of one layer in the slots [T]. No two rows may share a slot."""
    block_size = kv.shape[4]
    blocks, offsets = slots // block_size, slots % block_size
    kv[blocks, layer, 0, :, offsets] = keys
    kv[blocks, layer, 1, :, offsets] = values


def read_kv(kv: Tensor, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the blocks in tables [n, b], in order: two float32 [n, Hkv, b * block_size, D]."""
    num_blocks, num_layers, _, num_heads, block_size, head_dim = kv.shape
    n, per_table = tables.shape
    # Rows of (K, V) for one block and layer: an index into these copies whole contiguous runs.
    pairs = kv.view(num_blocks * num_layers, 2, num_heads, block_size, head_dim)
    found = pairs.index_select(0, (tables.long() * num_layers + layer).view(-1))
    wide = torch.empty(2, n, num_heads, per_table, block_size, head_dim, dtype=torch.float32, device=kv.device)
    wide.copy_(found.view(n, per_table, 2, num_heads, block_size, head_dim).permute(2, 0, 3, 1, 4, 5))
    keys, values = wide.view(2, n, num_heads, per_table * block_size, head_dim)
    return keys, values
