"""Attention of sequences with one query row: parts of SPLIT keys are computed separately, then joined in order.

Promises: parts are counted from position 0, so a row's bits depend on nothing else in the step, nor on whether one
program computes all parts of a row or several do; sequences with several rows are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    JOINED: tl.constexpr,
    AHEAD: tl.constexpr,
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
    """One part of one sequence, for the query heads of one key head. Programs: (sequences, KV_HEADS, max_parts).

    With JOINED max_parts is 1, and a program computes all parts and joins them. With AHEAD the launch begins before the
    one before it has ended.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
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
    at_head = kv + layer.to(tl.int64) * KV_LAYER + head * KV_HEAD
    table = block_tables + sequence.to(tl.int64) * table_stride
    seen = tl.where(members < GROUP, length - 1, -1)
    peak, total, values = walk_keys(
        query, seen, at_head, table, tl.maximum(begin, part * SPLIT), 0, tl.minimum(length, part * SPLIT + SPLIT),
        scale,
        SOFTCAP, ROWS, TILE, WINDOW, HEAD_DIM, BLOCK_D, PAGE, KV_HALF, KV_BLOCK, FP8, False,
    )  # fmt: skip
    if JOINED:
        for at in range((part + 1) * SPLIT, length, SPLIT):
            part_peak, part_total, of_part = walk_keys(
                query, seen, at_head, table, at, 0, tl.minimum(length, at + SPLIT), scale,
                SOFTCAP, ROWS, TILE, WINDOW, HEAD_DIM, BLOCK_D, PAGE, KV_HALF, KV_BLOCK, FP8, False,
            )  # fmt: skip
            peak, total, values = join_parts(peak, total, values, part_peak, part_total, of_part)
    is_whole = length > 0 if JOINED else (first + 1) * SPLIT >= length
    if is_whole:  # there is no other part
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
    AHEAD: tl.constexpr,
):
    """Join the parts of one sequence's row and one head. Programs: (sequences, HEADS)."""
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
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


class DecodeParts(NamedTuple):
    """Memory for the parts of rows until they are joined."""

    values: Tensor  # [sequences, heads, max_parts, HEAD_DIM] float32
    sums: Tensor  # [2 (peak, total), sequences, heads, max_parts] float32
    max_parts: int


def num_parts(shape: AttentionShape, longest: int) -> int:
    """The parts of a row's keys at most, in contexts of up to `longest` tokens."""
    found = -(-longest // SPLIT)
    return found if shape.window is None else min(found, -(-shape.window // SPLIT) + 1)


def parts_together(shape: AttentionShape, num_sequences: int, max_parts: int) -> int:
    """The sequences whose parts there is memory for at once."""
    each = 4 * shape.num_heads * max_parts * shape.head_dim
    return num_sequences if max_parts == 1 else max(1, min(num_sequences, SCRATCH_BYTES // each))


def new_parts(shape: AttentionShape, num_sequences: int, max_parts: int, device: torch.device) -> DecodeParts:
    """Unused, hence small, if every row has one part; the dtypes are the same, so the kernel is too."""
    kept = (num_sequences, shape.num_heads, max_parts) if max_parts > 1 else (1, 1, 1)
    return DecodeParts(
        torch.empty(*kept, shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(2, *kept, dtype=torch.float32, device=device),
        max_parts,
    )


def decode_scratch(num_sequences: int, longest: int, num_heads: int, head_dim: int) -> int:
    """Maximum allocation of `attend_decode`, in bytes, for contexts of up to `longest` tokens, with any window."""
    each = 4 * num_heads * -(-longest // SPLIT) * head_dim
    values = min(num_sequences * each, max(SCRATCH_BYTES, each))
    return values + 2 * values // head_dim  # with the sums


def launch_parts(  # noqa: PLR0917
    q: Tensor,
    out: Tensor,
    shape: AttentionShape,
    kv: Tensor,
    sizes: PoolSizes,
    layer: int,
    step: AttentionInput,
    parts: DecodeParts,
    tiling: Tiling,
    *,
    first: int = 0,
    joined: bool = False,
    ahead: bool = False,
) -> None:
    """The parts of as many sequences as there is memory for, from the `first` on; rows that are whole go to out."""
    served = len(step.context_lens) - first
    if parts.max_parts > 1 and not joined:
        served = min(served, len(parts.values))
    decode_parts[served, shape.num_kv_heads, 1 if joined else parts.max_parts](
        q,
        out,
        kv,
        step.query_starts,
        step.context_lens,
        step.block_tables,
        parts.values,
        parts.sums,
        shape.sinks,
        layer,
        step.block_tables.stride(0),
        first,
        parts.max_parts,
        shape.scale * LOG2_E,
        SPLIT=SPLIT,
        JOINED=joined,
        AHEAD=ahead,
        **tiling.constants(shape, sizes),
        **launch_ahead(ahead),
    )


def launch_join(
    out: Tensor, shape: AttentionShape, step: AttentionInput, parts: DecodeParts, *, first: int = 0, ahead: bool = False
) -> None:
    """Join what `launch_parts` left in parts."""
    served = min(len(step.context_lens) - first, len(parts.values))
    decode_join[served, shape.num_heads](
        out,
        step.query_starts,
        step.context_lens,
        parts.values,
        parts.sums,
        shape.sinks,
        first,
        parts.max_parts,
        HEADS=shape.num_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=block_d(shape),
        SPLIT=SPLIT,
        WINDOW=shape.window or 0,
        SINKS=shape.sinks is not None,
        AHEAD=ahead,
        num_warps=1,
        **launch_ahead(ahead),
    )


def launch_ahead(ahead: bool) -> dict[str, bool]:
    """The launch option of kernels that may begin before the launch before them has ended."""
    return {"launch_pdl": True} if ahead else {}


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
    max_parts, num_sequences = num_parts(shape, longest), len(step.context_lens)
    together = parts_together(shape, num_sequences, max_parts)
    parts = new_parts(shape, together, max_parts, q.device)
    for first in range(0, num_sequences, together):
        launch_parts(q, out, shape, kv, sizes, layer, step, parts, tiling, first=first)
        if max_parts > 1:
            launch_join(out, shape, step, parts, first=first)
