"""The ops of a kernel set for rotary embedding, the KV pool and paged attention, by Triton.

Promises: no op synchronizes with the device: launches follow from shapes and from the step's host data.

A step's decode rows (one row per sequence) and its prefill rows are two launches over all its sequences; a program for
a sequence of the other launch exits at once, so a step needs no sorting, no index building and no copies.
"""

from __future__ import annotations

import logging
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.kernel_set import AttentionInput, AttentionShape, PoolPart
from quire_kernels.reference import REFERENCE
from quire_kernels.triton import pool
from quire_kernels.triton.decode_attention import attend_decode
from quire_kernels.triton.pool import KVType, PoolSizes
from quire_kernels.triton.prefill_attention import attend_prefill
from quire_kernels.triton.rope_write import rope_write
from quire_kernels.triton.tiling import Tiling, decode_tiling, prefill_tiling

_log = logging.getLogger(__name__)


class _Plan(NamedTuple):
    """The data of a step that determines its launches."""

    longest_decode: int  # the longest context of a sequence with one row; 0: there is none
    prefills: bool  # whether a sequence has several rows


class TritonAttention:
    """The attention ops of one kernel set.

    A pool that the kernels do not support has the reference's layout and uses the reference's ops; an unsupported fp8
    pool is an error. With `deterministic`, decode uses prefill's tile height and thus the same instructions, and
    prefill joins parts of the keys as decode does: both compute the same bits for a row. `warp_groups`: whether the GPU
    has compute capability 9.x or 10.x, whose matrix instructions use groups of four warps. `clears`: prompts' keys that
    every row of a tile sees are read and scored without masks.
    """

    def __init__(
        self,
        kv_type: KVType = "auto",
        *,
        warp_groups: bool = True,
        deterministic: bool = False,
        clears: bool = True,
    ) -> None:
        self._fp8 = kv_type == "fp8"
        self._warp_groups, self._deterministic, self._clears = warp_groups, deterministic, clears
        self._pool: tuple[weakref.ref[Tensor], PoolSizes] | None = None  # a weak reference: a pool is large
        self._step: tuple[AttentionInput, _Plan] | None = None

    def new_kv(  # noqa: PLR0917 - the op's contract
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """See `pool` for the layout. ValueError for an fp8 pool that the kernels do not support."""
        reason = pool.unsupported(head_dim=head_dim, block_size=block_size, dtype=dtype)
        if reason is not None and not self._fp8:
            _log.warning("attention runs without the Triton kernels: %s", reason)
        return pool.new_kv(num_blocks, num_layers, num_kv_heads, block_size, head_dim, dtype, device, fp8=self._fp8)

    def kv_block_bytes(
        self, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return pool.kv_block_bytes(num_layers, num_kv_heads, block_size, head_dim, dtype, fp8=self._fp8)

    def kv_part(self, kv: Tensor, heads: tuple[int, int], part: PoolPart) -> Tensor:
        return pool.kv_part(kv, heads, part, fp8=self._fp8)

    def rope_write(  # noqa: PLR0917 - the op's contract
        self, qkv: Tensor, rope: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput
    ) -> Tensor:
        sizes = self.sizes_of(shape, kv, layer, qkv.dtype)
        if sizes is None:
            return REFERENCE.rope_write(qkv, rope, shape, kv, layer, step)
        rows, dtype, device = len(step.positions), qkv.dtype, kv.device
        _require(qkv, (rows, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim), dtype, device, "qkv")
        _require(rope, (len(rope), shape.head_dim), torch.float32, device, "rope")
        _require(step.positions, (rows,), torch.int64, device, "positions")
        _require(step.kv_slots, (rows,), torch.int64, device, "kv_slots")
        for norm, heads in ((shape.q_norm, shape.num_heads), (shape.k_norm, shape.num_kv_heads)):
            if norm is not None:
                width = shape.head_dim * (heads if shape.row_norms else 1)
                wide = torch.float32 if norm.dtype == torch.float32 else dtype
                _require(norm, (width,), wide, device, "a norm of heads")
        return rope_write(qkv, rope, shape, kv, sizes, layer, step)

    def attention(self, q: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput) -> Tensor:
        sizes = self.sizes_of(shape, kv, layer, q.dtype)
        if sizes is None:
            return REFERENCE.attention(q, shape, kv, layer, step)
        _require(q, (len(step.positions), shape.num_heads, shape.head_dim), q.dtype, kv.device, "q")
        plan = self._plan(step)
        out = torch.empty_like(q)
        if plan.longest_decode:
            attend_decode(
                q,
                out,
                shape,
                kv,
                sizes,
                layer,
                step,
                longest=plan.longest_decode,
                tiling=self.decode_tiling(shape, sizes),
            )
        if plan.prefills:
            attend_prefill(
                q,
                out,
                shape,
                kv,
                sizes,
                layer,
                step,
                tiling=prefill_tiling(shape, sizes, warp_groups=self._warp_groups, deterministic=self._deterministic),
                joined=self._deterministic,
                clears=self._clears,
            )
        return out.flatten(1)

    def decode_tiling(self, shape: AttentionShape, sizes: PoolSizes) -> Tiling:
        """The tiles of rows that are alone in their sequences."""
        return decode_tiling(shape, sizes, warp_groups=self._warp_groups, deterministic=self._deterministic)

    def sizes_of(self, shape: AttentionShape, kv: Tensor, layer: int, dtype: torch.dtype) -> PoolSizes | None:
        """The pool's sizes; None for a pool of the reference. ValueError for a pool of another model."""
        if self._pool is None or self._pool[0]() is not kv:
            self._pool = weakref.ref(kv), pool.pool_sizes(kv, head_dim=shape.head_dim)
        sizes = self._pool[1]
        if (sizes.num_kv_heads, sizes.head_dim) != (shape.num_kv_heads, shape.head_dim) or not (
            0 <= layer < sizes.num_layers
        ):
            raise ValueError("kv was made for another model")
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"{shape.num_heads} heads do not divide into {shape.num_kv_heads} groups")
        if not sizes.fp8 and kv.dtype != dtype:
            raise ValueError(f"kv holds {kv.dtype}, the rows are {dtype}")
        served = pool.unsupported(head_dim=sizes.head_dim, block_size=sizes.page, dtype=dtype, fp8=sizes.fp8) is None
        return sizes if served else None

    def _plan(self, step: AttentionInput) -> _Plan:
        """The launches of a step, computed once for all layers."""
        if self._step is None or self._step[0] is not step:
            num_sequences = len(step.query_lens)
            device = step.positions.device
            _require(step.query_starts, (num_sequences + 1,), torch.int32, device, "query_starts")
            _require(step.context_lens, (num_sequences,), torch.int32, device, "context_lens")
            _require(step.block_tables, (num_sequences, *step.block_tables.shape[1:]), torch.int32, device, "tables")
            alone = (length for rows, length in zip(step.query_lens, step.kv_lens, strict=True) if rows == 1)
            self._step = step, _Plan(max(alone, default=0), step.max_query_len > 1)
        return self._step[1]


def _require(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of shape {shape} on {device}, "
            f"not {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )
