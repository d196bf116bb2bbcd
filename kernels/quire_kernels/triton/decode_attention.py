"""Attention of sequences with one query row: parts of SPLIT keys are computed separately, then joined in order.

Promises: parts are counted from position 0, so a row's bits depend on nothing else in the step; sequences with several
rows are skipped.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.kernel_set import AttentionInput, AttentionShape
from quire_kernels.triton.pool import PoolSizes
from quire_kernels.triton.softmax import LOG2_E, SPLIT, join_parts, walk_keys, with_sinks
from quire_kernels.triton.tiling import Tiling, block_d

# Arguments that change from step to step: no specialized kernels are compiled for their values.
_VARYING = ("layer", "table_stride", "first_sequence", "max_parts")
# Memory for the parts between the two launches; sequences that do not fit get further launches.
SCRATCH_BYTES = 64 << 20
_VIEWS = ("query_starts", "context_lens", "block_tables")  # parts of one packed buffer, with any alignment


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VIEWS)
def decode_parts(  # noqa: PLR0917
    q,  # [T, KV_HEADS * GROUP, HEAD_DIM]
    out,  # as q
    kv,  # the pool
    query_starts,  # [B + 1]
    context_lens,  # [B]
    block_tables,  # [B, table_stride]
    part_values,  # [sequences, heads, max_parts, HEAD_DIM] float32
    part_sums,  # [2 (peak, total), sequences, heads, max_parts] float32
    sinks,  # [KV_HEADS * GROUP] float32, or None
    layer,
    table_stride,
    first_sequence,  # the first sequence of this launch
    max_parts,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEAD: tl.constexpr,
    KV_HALF: tl.constexpr,
    KV_LAYER: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    """One part of one sequence, for the query heads of one key head. Programs: (sequences, KV_HEADS, max_parts)."""
    local, head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = first_sequence + local
    row = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - row != 1:
        return
    length = tl.load(context_lens + sequence)
    begin = 0
    first = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
        first = begin // SPLIT
        begin = begin // TILE * TILE
    part = first + slot
    if part * SPLIT >= length:
        return

    members, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    heads = head * GROUP + members
    held = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    place = row.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + place, mask=held, other=0.0)
    peak, total, values = walk_keys(
        query,
        tl.where(members < GROUP, length - 1, -1),
        kv + layer.to(tl.int64) * KV_LAYER + head * KV_HEAD,
        block_tables + sequence.to(tl.int64) * table_stride,
        tl.maximum(begin, part * SPLIT),
        tl.minimum(length, part * SPLIT + SPLIT),
        scale,
        SOFTCAP,
        ROWS,
        TILE,
        WINDOW,
        HEAD_DIM,
        BLOCK_D,
        PAGE,
        KV_HALF,
        KV_BLOCK,
        FP8,
    )
    if (first + 1) * SPLIT >= length:  # the only part
        if SINKS:
            total, values = with_sinks(peak, total, values, tl.load(sinks + heads, mask=members < GROUP, other=0.0))
        tl.store(out + place, (values / total[:, None]).to(out.dtype.element_ty), mask=held)
    else:
        kept = (local.to(tl.int64) * (KV_HEADS * GROUP) + heads) * max_parts + slot
        tl.store(part_values + kept[:, None] * HEAD_DIM + dims[None, :], values, mask=held)
        tl.store(part_sums + kept, peak, mask=members < GROUP)
        totals = tl.num_programs(0).to(tl.int64) * (KV_HEADS * GROUP) * max_parts
        tl.store(part_sums + totals + kept, total, mask=members < GROUP)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VIEWS)
def decode_join(  # noqa: PLR0917
    out,  # [T, HEADS, HEAD_DIM]
    query_starts,
    context_lens,
    part_values,
    part_sums,
    sinks,  # [HEADS] float32, or None
    first_sequence,
    max_parts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the parts of one sequence's row and one head. Programs: (sequences, HEADS)."""
    local, head = tl.program_id(0), tl.program_id(1)
    sequence = first_sequence + local
    row = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - row != 1:
        return
    length = tl.load(context_lens + sequence)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // SPLIT
    if (first + 1) * SPLIT >= length:
        return
    dims = tl.arange(0, BLOCK_D)
    held = dims < HEAD_DIM
    kept = (local.to(tl.int64) * HEADS + head) * max_parts
    totals = tl.num_programs(0).to(tl.int64) * HEADS * max_parts
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    values = tl.zeros([1, BLOCK_D], tl.float32)
    for slot in range(0, tl.cdiv(length, SPLIT) - first):
        at = kept + slot
        part = tl.load(part_values + at * HEAD_DIM + dims, mask=held, other=0.0)
        part_peak = tl.load(part_sums + at)
        part_total = tl.load(part_sums + totals + at)
        peak, total, values = join_parts(peak, total, values, part_peak, part_total, part[None, :])
    if SINKS:
        total, values = with_sinks(peak, total, values, tl.load(sinks + head + tl.arange(0, 1)))
    result = (values / total[:, None]).to(out.dtype.element_ty)
    place = row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM + dims
    tl.store(out + place[None, :], result, mask=held[None, :])


def _join_constants(shape: AttentionShape) -> dict[str, Any]:
    """Compile-time constants and launch options of `decode_join`."""
    return {
        "HEADS": shape.num_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_D": block_d(shape),
        "SPLIT": SPLIT,
        "WINDOW": shape.window or 0,
        "SINKS": shape.sinks is not None,
        "num_warps": 1,
    }


def decode_scratch(num_sequences: int, longest: int, num_heads: int, head_dim: int) -> int:
    """Maximum allocation of `attend_decode`, in bytes, for contexts of up to `longest` tokens, with any window."""
    each = 4 * num_heads * -(-longest // SPLIT) * head_dim
    values = min(num_sequences * each, max(SCRATCH_BYTES, each))
    return values + 2 * values // head_dim  # with the sums


def attend_decode(  # noqa: PLR0917
    q: Tensor,
    out: Tensor,
    shape: AttentionShape,
    kv: Tensor,
    sizes: PoolSizes,
    layer: int,
    step: AttentionInput,
    *,
    longest: int,
    tiling: Tiling,
) -> None:
    """Fill the rows of out [T, Hq, D] of sequences with one row; their contexts have at most `longest` tokens."""
    max_parts = -(-longest // SPLIT)
    if shape.window is not None:
        max_parts = min(max_parts, -(-shape.window // SPLIT) + 1)
    num_sequences = len(step.context_lens)
    together, kept = (
        num_sequences,
        (1, 1, 1),
    )  # unused if every row has one part; the dtypes are the same, so the kernel is too
    if max_parts > 1:
        together = max(1, min(num_sequences, SCRATCH_BYTES // (4 * shape.num_heads * max_parts * shape.head_dim)))
        kept = (together, shape.num_heads, max_parts)
    values = torch.empty(*kept, shape.head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(2, *kept, dtype=torch.float32, device=q.device)
    constants, joining = tiling.constants(shape, sizes), _join_constants(shape)
    for first in range(0, num_sequences, together):
        served = min(together, num_sequences - first)
        decode_parts[served, shape.num_kv_heads, max_parts](
            q,
            out,
            kv,
            step.query_starts,
            step.context_lens,
            step.block_tables,
            values,
            sums,
            shape.sinks,
            layer,
            step.block_tables.stride(0),
            first,
            max_parts,
            shape.scale * LOG2_E,
            SPLIT=SPLIT,
            **constants,
        )
        if max_parts > 1:
            decode_join[served, shape.num_heads](
                out, step.query_starts, step.context_lens, values, sums, shape.sinks, first, max_parts, **joining
            )
