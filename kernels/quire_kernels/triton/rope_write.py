"""Norms and rotary embedding of the query and key heads, and the write of K and V into the pool, in one launch.

Promises: the result of a (row, head) depends only on its own input; rounded as in the reference. Must not know:
sequences.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.kernel_set import AttentionInput, AttentionShape, Norm
from quire_kernels.triton.e4m3 import LARGEST, encode_e4m3
from quire_kernels.triton.norm import rms_norm_
from quire_kernels.triton.pool import PoolSizes

_LARGEST = tl.constexpr(LARGEST)
_ELEMENTS = 2048  # elements per program: 16 for each of its threads


@triton.jit
def norm_halves(first, second, chosen, norm, half, held, eps, stored: tl.constexpr, HEAD_DIM: tl.constexpr):  # noqa: PLR0917
    """Return both halves of heads [HEADS, HALF], normed if `chosen` [HEADS, 1]; rounded as in the reference."""
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    root = tl.sqrt_rn(square / HEAD_DIM + eps)[:, None]
    dtype: tl.constexpr = norm.dtype.element_ty  # float32: nothing is rounded before the multiplication
    low = tl.load(norm + half, mask=held, other=0.0).to(tl.float32)[None, :]
    high = tl.load(norm + HEAD_DIM // 2 + half, mask=held, other=0.0).to(tl.float32)[None, :]
    normed_low = (tl.div_rn(first, root).to(dtype).to(tl.float32) * low).to(stored).to(tl.float32)
    normed_high = (tl.div_rn(second, root).to(dtype).to(tl.float32) * high).to(stored).to(tl.float32)
    return tl.where(chosen, normed_low, first), tl.where(chosen, normed_high, second)


@triton.jit
def write_halves(  # noqa: PLR0917
    kv, runs, offset, first, second, half, held, written, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, FP8: tl.constexpr
):
    """Write both halves of keys or values [N, HALF] that are `written` into the pool, at `offset` of a head's page.

    `runs` [N]: where the pages begin. `offset` may be one for all.
    """
    into = kv + (runs + offset * HEAD_DIM)[:, None] + half[None, :]
    inside = written[:, None] & held[None, :]
    if FP8:
        low, high = first.to(tl.float32), second.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        largest = tl.zeros_like(most) + _LARGEST
        inverse = tl.where(most > 1e-30, tl.div_rn(largest, most), 0.0)[:, None]
        # The maximum ignores NaN, the sum does not: it makes the scale NaN, and so every value that is read.
        broken = tl.sum(low * 0.0, 1) + tl.sum(high * 0.0, 1)
        tl.store(into, encode_e4m3(low * inverse), mask=inside)
        tl.store(into + HEAD_DIM // 2, encode_e4m3(high * inverse), mask=inside)
        at_scale = (kv + runs + PAGE * HEAD_DIM).to(tl.pointer_type(tl.float32)) + offset
        tl.store(at_scale, tl.div_rn(most, largest) + broken, mask=written)
    else:
        tl.store(into, first, mask=inside)
        tl.store(into + HEAD_DIM // 2, second, mask=inside)


@triton.jit(do_not_specialize=("layer",), do_not_specialize_on_alignment=("positions", "kv_slots"))
def rope_write_heads(  # noqa: PLR0917
    qkv,  # [T, (GROUP + 2) * KV_HEADS * HEAD_DIM] in heads: queries, keys, values
    rope,  # [P, HEAD_DIM] float32: cosines, then sines
    positions,  # [T] int64
    kv_slots,  # [T] int64
    q_norm,  # [HEAD_DIM]
    k_norm,  # [HEAD_DIM]
    q,  # [T, GROUP * KV_HEADS, HEAD_DIM]
    kv,  # the pool
    layer,
    eps,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    NORM_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEAD: tl.constexpr,
    KV_HALF: tl.constexpr,
    KV_LAYER: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    """HEADS heads of one row. Programs: (rows, groups of heads)."""
    row = tl.program_id(0).to(tl.int64)
    heads, half = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    is_query = heads < GROUP * KV_HEADS
    is_value = heads >= (GROUP + 1) * KV_HEADS
    exists = heads < (GROUP + 2) * KV_HEADS
    held = half < HEAD_DIM // 2
    there = exists[:, None] & held[None, :]
    place = qkv + row * ((GROUP + 2) * KV_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + half[None, :]
    first = tl.load(place, mask=there, other=0.0).to(tl.float32)
    second = tl.load(place + HEAD_DIM // 2, mask=there, other=0.0).to(tl.float32)
    plain_first, plain_second = first, second
    stored: tl.constexpr = q.dtype.element_ty
    if NORM_Q:
        first, second = norm_halves(first, second, is_query[:, None], q_norm, half, held, eps, stored, HEAD_DIM)
    if NORM_K:
        is_key = (heads >= GROUP * KV_HEADS) & (heads < (GROUP + 1) * KV_HEADS)
        first, second = norm_halves(first, second, is_key[:, None], k_norm, half, held, eps, stored, HEAD_DIM)

    if NORM_V:
        square = tl.sum(plain_first * plain_first, 1) + tl.sum(plain_second * plain_second, 1)
        root = tl.sqrt_rn(square / HEAD_DIM + eps)[:, None]
        plain_first, plain_second = tl.div_rn(plain_first, root), tl.div_rn(plain_second, root)

    angles = rope + tl.load(positions + row) * HEAD_DIM + half
    cos = tl.load(angles, mask=held, other=0.0)[None, :]
    sin = tl.load(angles + HEAD_DIM // 2, mask=held, other=0.0)[None, :]
    turned_first = tl.where(is_value[:, None], plain_first, first * cos - second * sin)
    turned_second = tl.where(is_value[:, None], plain_second, second * cos + first * sin)
    dtype: tl.constexpr = q.dtype.element_ty
    turned_first, turned_second = turned_first.to(dtype), turned_second.to(dtype)
    at_query = q + row * (GROUP * KV_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + half[None, :]
    asked = is_query[:, None] & held[None, :]
    tl.store(at_query, turned_first, mask=asked)
    tl.store(at_query + HEAD_DIM // 2, turned_second, mask=asked)

    slot = tl.load(kv_slots + row)
    key_head = (heads - GROUP * KV_HEADS) % KV_HEADS
    run = slot // PAGE * KV_BLOCK + layer * KV_LAYER + is_value.to(tl.int32) * KV_HALF + key_head * KV_HEAD
    is_stored = exists & (heads >= GROUP * KV_HEADS)
    write_halves(kv, run, slot % PAGE, turned_first, turned_second, half, held, is_stored, PAGE, HEAD_DIM, FP8)


def rope_write_options(shape: AttentionShape, sizes: PoolSizes) -> dict[str, Any]:
    """Compile-time constants and launch options of the kernel."""
    half = triton.next_power_of_2(sizes.head_dim // 2)
    return {
        "GROUP": shape.num_heads // shape.num_kv_heads,
        "HEADS": max(1, _ELEMENTS // (2 * half)),
        "HALF": half,
        "NORM_Q": shape.q_norm is not None and not shape.row_norms,
        "NORM_K": shape.k_norm is not None and not shape.row_norms,
        "NORM_V": shape.v_norm,
        **sizes.constants(),
        "num_warps": 4,
    }


def rope_write(  # noqa: PLR0917 - the op's contract
    qkv: Tensor, rope: Tensor, shape: AttentionShape, kv: Tensor, sizes: PoolSizes, layer: int, step: AttentionInput
) -> Tensor:
    """The set's `rope_write` op: returns q [T, Hq, D]."""
    q = qkv.new_empty(qkv.shape[0], shape.num_heads, shape.head_dim)
    options = rope_write_options(shape, sizes)
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    if shape.row_norms and shape.q_norm is not None and shape.k_norm is not None:
        q_width, k_width = len(shape.q_norm), len(shape.k_norm)
        rms_norm_(qkv[:, :q_width], Norm(shape.q_norm, shape.norm_eps))
        rms_norm_(qkv[:, q_width : q_width + k_width], Norm(shape.k_norm, shape.norm_eps))
    if len(q):
        rope_write_heads[len(q), triton.cdiv(num_heads, options["HEADS"])](
            qkv,
            rope,
            step.positions,
            step.kv_slots,
            qkv if shape.q_norm is None else shape.q_norm,
            qkv if shape.k_norm is None else shape.k_norm,
            q,
            kv,
            layer,
            shape.norm_eps,
            **options,
        )
    return q
