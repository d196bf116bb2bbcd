"""Rotary embedding, the KV pool and paged attention by the C++ kernels, for bf16 activations.

Promises: addresses, shapes and dtypes are checked here before any reaches C++; `attention.h` describes the pool.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping, Sequence
from ctypes import Array
from typing import Literal

import torch
from torch import Tensor

from quire_kernels.cpu.context import Context, map_huge
from quire_kernels.cpu.kv_layout import UNIT, unsupported
from quire_kernels.cpu.ranks import raise_for_lost
from quire_kernels.cpu.signatures import PoolArgs, ShapeArgs, StepArgs
from quire_kernels.kernel_set import AttentionInput, AttentionShape, PoolPart

KVType = Literal["bf16", "int8"]
_CPU = torch.device("cpu")
_KINDS: dict[torch.dtype, int] = {torch.bfloat16: 0, torch.uint8: 1}
_OUT_OF_RANGE = 2
_DIMS = 5  # dimensions of a pool
_REMEMBERED_SHAPES = 1024  # most cached layers, of all loaded models


class CpuAttention:
    """The attention ops of one kernel set.

    The C++ arguments of the last step and pool, and of every layer's shape, are cached, since all layers share them.
    """

    def __init__(self, context: Context, kv_type: KVType = "bf16") -> None:
        self._context = context  # keeps the workers
        self._handle = context.handle
        self._rope_write = context.library.quire_rope_write
        self._attention = context.library.quire_attention
        self._dtype = torch.bfloat16 if kv_type == "bf16" else torch.uint8
        self._step: tuple[AttentionInput, StepArgs] | None = None
        self._pool: tuple[weakref.ref[Tensor], PoolArgs] | None = (
            None  # weak, so that this does not keep a large pool alive
        )
        self._shapes: dict[int, tuple[AttentionShape, ShapeArgs]] = {}

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
        """[blocks, layers, kv heads, units, elements of a unit], bf16 or bytes. ValueError for unsupported sizes.

        From now on the pages are committed in order by idle cores.
        """
        _check_pool(block_size, head_dim, dtype, device)
        sizes = (num_blocks, num_layers, num_kv_heads, block_size // UNIT, self._unit_elements(head_dim))
        num_bytes = math.prod(sizes) * self._dtype.itemsize
        memory = map_huge(num_bytes)[:num_bytes]
        # Committing only saves time later: without it, pages are committed by the first write to them.
        self._context.library.quire_commit(self._handle, memory.data_ptr(), num_bytes)
        return memory.view(self._dtype).view(sizes)

    def kv_block_bytes(
        self, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        _check_pool(block_size, head_dim, dtype)
        units = num_layers * num_kv_heads * (block_size // UNIT)
        return units * self._unit_elements(head_dim) * self._dtype.itemsize

    def kv_part(self, kv: Tensor, heads: tuple[int, int], part: PoolPart) -> Tensor:
        del heads
        units = kv.shape[3]

        def sizes(some: PoolPart) -> tuple[int, ...]:
            return (some.num_layers, some.num_kv_heads, units, self._unit_elements(some.head_dim))

        first = sum(math.prod(sizes(other)) for other in part.before)
        return kv.flatten(1)[:, first : first + math.prod(sizes(part))].view(-1, *sizes(part))

    def rope_write(  # noqa: PLR0917 - the op's contract
        self, qkv: Tensor, rope: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput
    ) -> Tensor:
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        _require(qkv, (step.positions.shape[0], width), torch.bfloat16, "qkv")
        _require(rope, (rope.shape[0], shape.head_dim), torch.float32, "rope")
        q = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype)
        failed = self._rope_write(
            self._handle,
            ctypes.addressof(self.shape_args(shape)),
            self.pool_args(kv, shape, layer),
            layer,
            self.step_args(step),
            qkv.data_ptr(),
            rope.data_ptr(),
            rope.shape[0],
            q.data_ptr(),
        )
        raise_for(failed)
        return q

    def attention(self, q: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput) -> Tensor:
        _require(q, (step.positions.shape[0], shape.num_heads, shape.head_dim), torch.bfloat16, "q")
        out = torch.empty_like(q)
        failed = self._attention(
            self._handle,
            ctypes.addressof(self.shape_args(shape)),
            self.pool_args(kv, shape, layer),
            layer,
            self.step_args(step),
            q.data_ptr(),
            out.data_ptr(),
        )
        raise_for(failed)
        return out.flatten(1)

    def _unit_elements(self, head_dim: int) -> int:
        return 2 * UNIT * head_dim if self._dtype == torch.bfloat16 else 2 * UNIT * head_dim + 2 * UNIT * 4

    def shape_args(self, shape: AttentionShape) -> ShapeArgs:
        """The layer's constants for C++; they live as long as the returned object."""
        found = self._shapes.get(id(shape))  # ids are unique, since the entry keeps its shape alive
        if found is None:
            if shape.num_heads % shape.num_kv_heads:
                raise ValueError(f"{shape.num_heads} heads do not divide into {shape.num_kv_heads} groups")
            if len(self._shapes) >= _REMEMBERED_SHAPES:
                self._shapes.clear()
            norms = tuple(
                None if norm is None else norm.to(torch.float32).contiguous() for norm in (shape.q_norm, shape.k_norm)
            )
            for norm, heads in zip(norms, (shape.num_heads, shape.num_kv_heads), strict=True):
                if norm is not None:
                    width = shape.head_dim * (heads if shape.row_norms else 1)
                    _require(norm, (width,), torch.float32, "a norm of heads")
            sinks = None if shape.sinks is None else shape.sinks.to(torch.float32).contiguous()
            if sinks is not None:
                _require(sinks, (shape.num_heads,), torch.float32, "sinks")
            arguments = ShapeArgs(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                scale=shape.scale,
                norm_eps=shape.norm_eps,
                softcap=shape.softcap or 0.0,
                row_norms=shape.row_norms,
                v_norm=shape.v_norm,
                bidirectional=shape.bidirectional,
                window=shape.window or 0,
                q_norm=None if norms[0] is None else norms[0].data_ptr(),
                k_norm=None if norms[1] is None else norms[1].data_ptr(),
                sinks=None if sinks is None else sinks.data_ptr(),
            )
            arguments.kept = norms, sinks
            found = self._shapes[id(shape)] = shape, arguments
        return found[1]

    def pool_args(self, kv: Tensor, shape: AttentionShape, layer: int) -> int:
        """The address of the pool's description. ValueError if it is not a pool for such heads and layers."""
        if self._pool is None or self._pool[0]() is not kv:
            self._pool = weakref.ref(kv), _describe_pool(kv)
        _check_fits(self._pool[1], shape, layer)
        return ctypes.addressof(self._pool[1])

    def parts_args(self, kv: Sequence[Tensor], last: Mapping[int, tuple[AttentionShape, int]]) -> Array[PoolArgs]:
        """The descriptions of a pool's parts; of those that are used, the last layer is given. ValueError as above."""
        pools = [_describe_pool(part) for part in kv]
        if max(last) >= len(pools):
            raise ValueError(f"the pool has {len(pools)} parts, the layers need {1 + max(last)}")
        for part, (shape, layer) in last.items():
            _check_fits(pools[part], shape, layer)
        return (PoolArgs * len(pools))(*pools)

    def step_args(self, step: AttentionInput) -> int:
        """The address of the step's description, valid until the next call with another step."""
        if self._step is None or self._step[0] is not step:
            self._step = step, describe(step)
        return ctypes.addressof(self._step[1])


def _describe_pool(kv: Tensor) -> PoolArgs:
    """A pool, or the layers of a part of its blocks, for C++."""
    if kv.dim() != _DIMS or kv.dtype not in _KINDS or not kv[:1].is_contiguous() or kv.device.type != "cpu":
        raise ValueError("kv is not a pool of the CPU kernels")
    units = kv.shape[4] if kv.dtype == torch.bfloat16 else kv.shape[4] - 2 * UNIT * 4
    return PoolArgs(
        data=kv.data_ptr(),
        kind=_KINDS[kv.dtype],
        units=kv.shape[3],
        num_blocks=kv.shape[0],
        num_layers=kv.shape[1],
        num_kv_heads=kv.shape[2],
        head_dim=units // (2 * UNIT),
        block_bytes=kv.stride(0) * kv.dtype.itemsize,
    )


def _check_fits(pool: PoolArgs, shape: AttentionShape, layer: int) -> None:
    fits = (pool.num_kv_heads, pool.head_dim) == (shape.num_kv_heads, shape.head_dim)
    if not fits or not 0 <= layer < pool.num_layers:
        raise ValueError("kv was made for another model")


def describe(step: AttentionInput) -> StepArgs:
    """The step's description for C++. ValueError for tensors that do not fit together."""
    num_rows, num_sequences = step.positions.shape[0], step.context_lens.shape[0]
    _require(step.positions, (num_rows,), torch.int64, "positions")
    _require(step.kv_slots, (num_rows,), torch.int64, "kv_slots")
    _require(step.query_starts, (num_sequences + 1,), torch.int32, "query_starts")
    _require(step.context_lens, (num_sequences,), torch.int32, "context_lens")
    _require(step.block_tables, (num_sequences, step.block_tables.shape[-1]), torch.int32, "block_tables")
    tensors = (step.positions, step.kv_slots, step.query_starts, step.context_lens, step.block_tables)
    positions, slots, starts, lengths, tables = (tensor.data_ptr() for tensor in tensors)
    arguments = StepArgs(
        rows=num_rows,
        sequences=num_sequences,
        table_width=step.block_tables.shape[1],
        positions=positions,
        slots=slots,
        query_starts=starts,
        context_lens=lengths,
        block_tables=tables,
    )
    arguments.kept = tensors
    return arguments


def _check_pool(block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device = _CPU) -> None:
    if dtype != torch.bfloat16 or device.type != "cpu":
        raise ValueError(f"the C++ kernels compute in bfloat16 on a CPU, not in {dtype} on {device.type}")
    reason = unsupported(head_dim=head_dim, block_size=block_size)
    if reason is not None:
        raise ValueError(f"the C++ kernels {reason}")


def _require(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be a contiguous {dtype} CPU tensor of shape {shape}, "
            f"not {tensor.dtype} on {tensor.device.type} of shape {tuple(tensor.shape)}"
        )


def raise_for(failed: int) -> None:
    raise_for_lost(failed)
    if failed == _OUT_OF_RANGE:
        raise IndexError("a position, slot or block of this step does not exist")
    if failed:
        raise MemoryError("no memory for attention")
