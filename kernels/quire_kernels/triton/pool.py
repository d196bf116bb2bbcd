"""The layout of the KV pool of the Triton kernels, and the sizes that kernels are compiled for.

Promises: a block's bytes are contiguous over all layers, so `kv[target] = kv[source]` copies a block; with K and V in
the model's dtype the layout is the reference's.

The layout is [blocks, layers, 2 (K, V), kv_heads, page, head_dim] in the model's dtype, or, with K and V in eight bits
(e4m3), [blocks, layers, 2, kv_heads, page * (head_dim + 4)] bytes: the values of a head's page, [page, head_dim],
followed by one float32 scale for each of its tokens. A value is e4m3 * scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire_kernels.kernel_set import PoolPart
from quire_kernels.reference import REFERENCE

# Type of the stored keys and values: the model's dtype, or e4m3 with a scale for every token and head.
KVType = Literal["auto", "fp8"]

DTYPES = (torch.bfloat16, torch.float16)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 512
_SCALE_BYTES = 4
_REFERENCE_DIMS, _FP8_DIMS = 6, 5


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The constants of a pool, in elements (fp8: bytes)."""

    num_layers: int
    num_kv_heads: int
    page: int
    head_dim: int
    fp8: bool
    block_stride: int = 0  # distance from one block to the next one; 0: of blocks that are these layers alone

    @property
    def head_stride(self) -> int:
        """Distance from one head's page to the next one's."""
        return self.page * (self.head_dim + (_SCALE_BYTES if self.fp8 else 0))

    def constants(self) -> dict[str, int | bool]:
        """The kernels' compile-time constants."""
        head = self.head_stride
        half = self.num_kv_heads * head
        return {
            "HEAD_DIM": self.head_dim,
            "PAGE": self.page,
            "KV_HEADS": self.num_kv_heads,
            "KV_HEAD": head,
            "KV_HALF": half,
            "KV_LAYER": 2 * half,
            "KV_BLOCK": self.block_stride or self.num_layers * 2 * half,
            "FP8": self.fp8,
        }


def unsupported(*, head_dim: int, block_size: int, dtype: torch.dtype, fp8: bool = False) -> str | None:
    """The reason why these kernels do not support a pool of such heads and blocks; None if they do."""
    if dtype not in DTYPES:
        return f"activations are {dtype}, not bfloat16 or float16"
    multiple = 16 if fp8 else 8  # rows of 16 bytes
    if head_dim % multiple or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of {multiple} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if fp8 and block_size % 4:
        return f"block_size {block_size} is not a multiple of 4"
    return None


def new_kv(  # noqa: PLR0917 - the op's contract
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool = False,
) -> Tensor:
    """A zeroed pool. ValueError for an fp8 pool that the kernels do not support."""
    if not fp8:
        return REFERENCE.new_kv(num_blocks, num_layers, num_kv_heads, block_size, head_dim, dtype, device)
    _require_fp8(head_dim, block_size, dtype)
    sizes = PoolSizes(num_layers, num_kv_heads, block_size, head_dim, fp8)
    return torch.zeros(num_blocks, num_layers, 2, num_kv_heads, sizes.head_stride, dtype=torch.uint8, device=device)


def kv_block_bytes(
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    fp8: bool = False,
) -> int:
    if not fp8:
        return REFERENCE.kv_block_bytes(num_layers, num_kv_heads, block_size, head_dim, dtype)
    _require_fp8(head_dim, block_size, dtype)
    return num_layers * 2 * num_kv_heads * PoolSizes(num_layers, num_kv_heads, block_size, head_dim, fp8).head_stride


def kv_part(kv: Tensor, heads: tuple[int, int], part: PoolPart, *, fp8: bool = False) -> Tensor:
    if not fp8:
        return REFERENCE.kv_part(kv, heads, part)
    page = pool_sizes(kv, head_dim=heads[1]).page

    def sizes(some: PoolPart) -> tuple[int, ...]:
        head = PoolSizes(some.num_layers, some.num_kv_heads, page, some.head_dim, fp8).head_stride
        return (some.num_layers, 2, some.num_kv_heads, head)

    first = sum(math.prod(sizes(other)) for other in part.before)
    return kv.flatten(1)[:, first : first + math.prod(sizes(part))].view(-1, *sizes(part))


def pool_sizes(kv: Tensor, *, head_dim: int) -> PoolSizes:
    """The sizes of a pool from `new_kv`, or of a part of it. ValueError for another tensor, or one of other heads."""
    fp8 = kv.dtype == torch.uint8
    if not kv[:1].is_contiguous() or kv.dim() != (_FP8_DIMS if fp8 else _REFERENCE_DIMS):
        raise ValueError("kv is not a pool of the Triton kernels")
    _, num_layers, _, num_kv_heads, *last = kv.shape
    page = kv.shape[4] // (head_dim + _SCALE_BYTES) if fp8 else kv.shape[4]
    sizes = PoolSizes(num_layers, num_kv_heads, page, head_dim, fp8, block_stride=kv.stride(0))
    if math.prod(last) != sizes.head_stride:
        raise ValueError("kv was made for another model")
    return sizes


def _require_fp8(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    reason = unsupported(head_dim=head_dim, block_size=block_size, dtype=dtype, fp8=True)
    if reason is not None:
        raise ValueError(f"there is no fp8 KV pool for this model: {reason}")
