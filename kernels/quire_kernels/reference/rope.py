"""Per-head norms, rotary position embedding, and the write of K and V into the pool.

Promises: elementwise or per head, so a row's result is independent of other rows; angles depend only on the row's
position. Must not know: sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_kernels.kernel_set import AttentionInput, AttentionShape
from quire_kernels.reference.linear import by_tiles, rms_norm
from quire_kernels.reference.paged_kv import write_kv


def rope_write(  # noqa: PLR0917 - the op's contract
    qkv: Tensor, rope: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput
) -> Tensor:
    heads = qkv.view(len(qkv), -1, shape.head_dim)  # [T, Hq + 2 Hkv, D]
    first_k, first_v = shape.num_heads, shape.num_heads + shape.num_kv_heads
    q, k, v = heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]
    if shape.q_norm is not None:
        q = _norm(q, shape.q_norm, shape)
    if shape.k_norm is not None:
        k = _norm(k, shape.k_norm, shape)
    if shape.v_norm:
        v = rms_norm(v, torch.ones(shape.head_dim, device=v.device), shape.norm_eps)
    angles = rope[step.positions].unsqueeze(1)  # [T, 1, D]: cosines, then sines
    write_kv(kv, layer, step.kv_slots, _rotate(k, angles), v)
    return _rotate(q, angles)


def _norm(heads: Tensor, weight: Tensor, shape: AttentionShape) -> Tensor:
    """Heads [T, n, D], each by itself or all of a row as one."""
    if not shape.row_norms:
        return rms_norm(heads, weight, shape.norm_eps)
    rows = by_tiles(lambda some: rms_norm(some, weight, shape.norm_eps), heads.flatten(1))
    return rows.view(heads.shape)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) by the row's angles, in float32; the result has x's dtype."""
    cos, sin = angles.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
