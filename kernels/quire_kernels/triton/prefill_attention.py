"""Attention of sequences with several query rows: tiles of rows over the cached prefix and the rows' own keys.

Promises: a row's bits do not depend on the rows that share its tile; with JOINED its sums equal decode's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.kernel_set import AttentionInput, AttentionShape
from quire_kernels.triton.pool import PoolSizes
from quire_kernels.triton.softmax import LOG2_E, SPLIT, join_parts, walk_keys, with_sinks
from quire_kernels.triton.tiling import Tiling

_VARYING = ("layer", "table_stride", "num_sequences")
_VIEWS = ("query_starts", "context_lens", "block_tables")  # parts of one packed buffer, with any alignment
_SEARCH = tl.constexpr(128)  # sequences per step of the search


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VIEWS)
def prefill_tile(  # noqa: PLR0917
    q,  # [T, KV_HEADS * GROUP, HEAD_DIM]
    out,  # as q
    kv,  # the pool
    query_starts,  # [B + 1]
    context_lens,  # [B]
    block_tables,  # [B, table_stride]
    sinks,  # [KV_HEADS * GROUP] float32, or None
    layer,
    table_stride,
    num_sequences,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    JOINED: tl.constexpr,
    CLEARS: tl.constexpr,
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
    """ROWS pairs of a query row and one of the heads that share a key head. Programs: (tiles, KV_HEADS).

    Sequence i gets the tiles from query_starts[i] * GROUP // ROWS + i on, which are always enough. So the number of
    tiles follows from the number of rows and sequences, and a step needs no tile table.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows of a prompt have the most keys: they start first
    head = tl.program_id(1)
    behind = tl.zeros([], tl.int32)
    for at in range(0, num_sequences, _SEARCH):
        index = at + tl.arange(0, _SEARCH)
        starts = tl.load(query_starts + index, mask=index < num_sequences, other=0)
        begins = (index < num_sequences) & (starts * GROUP // ROWS + index <= tile)
        behind += tl.sum(begins.to(tl.int32), 0)
    sequence = behind - 1
    first_row = tl.load(query_starts + sequence)
    num_rows = tl.load(query_starts + sequence + 1) - first_row
    first_pair = (tile - first_row * GROUP // ROWS - sequence) * ROWS
    if (num_rows <= 1) | (first_pair >= num_rows * GROUP):
        return

    pairs, dims = first_pair + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    rows = pairs // GROUP
    held = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = head * GROUP + pairs % GROUP
    place = ((first_row + rows).to(tl.int64) * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + place, mask=held, other=0.0)
    cached = tl.load(context_lens + sequence) - num_rows
    seen = tl.where(rows < num_rows, cached + rows, -1)
    end = cached + tl.minimum((first_pair + ROWS - 1) // GROUP + 1, num_rows)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(cached + first_pair // GROUP - WINDOW + 1, 0) // TILE * TILE
    at_head = layer.to(tl.int64) * KV_LAYER + head * KV_HEAD
    table = block_tables + sequence.to(tl.int64) * table_stride
    if JOINED:
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for at in range(begin // SPLIT * SPLIT, end, SPLIT):
            part_peak, part_total, part_values = walk_keys(
                query,
                seen,
                kv + at_head,
                table,
                tl.maximum(begin, at),
                0,
                tl.minimum(end, at + SPLIT),
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
                False,
            )
            peak, total, values = join_parts(peak, total, values, part_peak, part_total, part_values)
    else:
        peak, total, values = walk_keys(
            query,
            seen,
            kv + at_head,
            table,
            begin,
            # Of keys below the diagonal nothing is masked: those that the tile's first row sees, which all see.
            (cached + first_pair // GROUP + 1) // TILE * TILE,
            end,
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
            CLEARS & (WINDOW == 0) & (HEAD_DIM <= 128),  # the loops of wider heads fill the registers as they are
        )
    if SINKS:
        total, values = with_sinks(peak, total, values, tl.load(sinks + heads))
    tl.store(out + place, (values / total[:, None]).to(out.dtype.element_ty), mask=held)


def attend_prefill(  # noqa: PLR0917
    q: Tensor,
    out: Tensor,
    shape: AttentionShape,
    kv: Tensor,
    sizes: PoolSizes,
    layer: int,
    step: AttentionInput,
    *,
    tiling: Tiling,
    joined: bool,
    clears: bool = True,
) -> None:
    """Fill the rows of out [T, Hq, D] of sequences with several rows.

    `clears`: keys that all rows of a tile see have no masks.
    """
    num_sequences = len(step.context_lens)
    tiles = len(q) * (shape.num_heads // shape.num_kv_heads) // tiling.rows + num_sequences
    prefill_tile[tiles, shape.num_kv_heads](
        q,
        out,
        kv,
        step.query_starts,
        step.context_lens,
        step.block_tables,
        shape.sinks,
        layer,
        step.block_tables.stride(0),
        num_sequences,
        shape.scale * LOG2_E,
        SPLIT=SPLIT,
        JOINED=joined,
        CLEARS=clears,
        **tiling.constants(shape, sizes),
    )
