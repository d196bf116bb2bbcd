"""The loop over keys of decode and prefill: an online softmax, and the join of its parts.

Promises: a row's bits depend only on its query, its position and its keys, not on the rows that share the tile: tiles
of keys are counted from position 0, and a tile outside a row's keys leaves its state unchanged.

The state of a row is `peak`, the largest score so far (in powers of two; -inf: none), `total` and `values`, the sums of
the weights and of the weighted values relative to that peak (Milakov & Gimelshein 2018, arXiv:1805.02867).
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_kernels.triton.e4m3 import DECODED, decode_e4m3

# Keys per part: decode computes parts separately and joins them in order, so their borders never depend on the batch.
SPLIT = 256
LOG2_E = 1.4426950408889634
_DECODED = tl.constexpr(DECODED)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def walk_tile(  # noqa: PLR0912, PLR0917 - one tile, with masks and without
    query, seen, kv, table, at, end, scale, peak, total, values,
    SOFTCAP: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, KV_HALF: tl.constexpr, KV_BLOCK: tl.constexpr, FP8: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """The state of rows after the tile of keys that begins at `at`.

    CLEAR: every row sees all of its keys. Then nothing is masked, which changes no row's bits.
    """
    dims, positions = tl.arange(0, BLOCK_D), at + tl.arange(0, TILE)
    present = positions < end
    if CLEAR:
        block = tl.load(table + positions // PAGE).to(tl.int64)
    else:
        block = tl.load(table + positions // PAGE, mask=present, other=0).to(tl.int64)
    offset = positions % PAGE
    place = (kv + block * KV_BLOCK + offset * HEAD_DIM)[:, None] + dims[None, :]
    # Memory past the end or the head is masked: 0 times a stale NaN is not 0.
    if CLEAR and HEAD_DIM == BLOCK_D:
        k = tl.load(place)
        v = tl.load(place + KV_HALF)
    else:
        there = (dims < HEAD_DIM)[None, :] if CLEAR else present[:, None]
        if HEAD_DIM != BLOCK_D and not CLEAR:
            there = there & (dims < HEAD_DIM)[None, :]
        k = tl.load(place, mask=there, other=0)
        v = tl.load(place + KV_HALF, mask=there, other=0)
    if FP8:
        k, v = decode_e4m3(k).to(query.dtype), decode_e4m3(v).to(query.dtype)
        at_scale = (kv + PAGE * HEAD_DIM).to(tl.pointer_type(tl.float32)) + block * (KV_BLOCK // 4) + offset
        if CLEAR:
            k_scale = tl.load(at_scale) * _DECODED
            v_scale = tl.load(at_scale + KV_HALF // 4) * _DECODED
        else:
            k_scale = tl.load(at_scale, mask=present, other=0.0) * _DECODED
            v_scale = tl.load(at_scale + KV_HALF // 4, mask=present, other=0.0) * _DECODED
    scores = tl.dot(query, tl.trans(k)) * scale
    if FP8:
        scores = scores * k_scale[None, :]
    if SOFTCAP > 0:  # tanh x = 1 - 2 / (1 + e^2x); the exponents' bound keeps the power finite
        power = tl.exp2(tl.minimum(scores * (2.0 / SOFTCAP), 126.0))
        scores = (SOFTCAP * _LOG2_E) * (1.0 - 2.0 / (1.0 + power))
    if not CLEAR:
        distance = seen[:, None] - positions[None, :]
        visible = distance >= 0
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = highest
    if not CLEAR:  # a row without keys so far has no peak: with any finite base its weights are exactly 0
        base = tl.where(highest == float("-inf"), 0.0, highest)
    fade = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None])
    total = tl.fma(total, fade, tl.sum(weights, 1))
    if FP8:
        weights = weights * v_scale[None, :]
    values = tl.dot(weights.to(query.dtype), v, values * fade[:, None])
    return highest, total, values


@triton.jit
def walk_keys(  # noqa: PLR0917
    query,  # [ROWS, BLOCK_D]
    seen,  # [ROWS] int32, the position of each row; -1: none
    kv,  # the pool, at the layer and head
    table,  # the sequence's row of the block tables
    begin,  # first position, a multiple of TILE
    clear,  # with CLEARS: a multiple of TILE, and not more than what every row sees; all before it are unmasked
    end,  # one past the last position; all positions before it are in the pool
    scale,  # factor of the scores, which are exponents of two
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HALF: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    CLEARS: tl.constexpr,
):
    """The state of each row after its keys among the positions begin .. end - 1."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if CLEARS:
        for at in range(begin, clear, TILE):
            peak, total, values = walk_tile(
                query, seen, kv, table, at, end, scale, peak, total, values,
                SOFTCAP, TILE, WINDOW, HEAD_DIM, BLOCK_D, PAGE, KV_HALF, KV_BLOCK, FP8, True,
            )  # fmt: skip
        begin = clear
    for at in range(begin, end, TILE):
        peak, total, values = walk_tile(
            query, seen, kv, table, at, end, scale, peak, total, values,
            SOFTCAP, TILE, WINDOW, HEAD_DIM, BLOCK_D, PAGE, KV_HALF, KV_BLOCK, FP8, False,
        )  # fmt: skip
    return peak, total, values


@triton.jit
def join_parts(peak, total, values, part_peak, part_total, part_values):  # noqa: PLR0917
    """The state of rows with one more part. Explicit fma keeps the sums the same in every kernel that inlines this."""
    highest = tl.maximum(peak, part_peak)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    fade, gain = tl.exp2(peak - base), tl.exp2(part_peak - base)
    total = tl.fma(part_total, gain, total * fade)
    values = tl.fma(part_values, gain[:, None], values * fade[:, None])
    return highest, total, values


@triton.jit
def with_sinks(peak, total, values, sinks):
    """The total and the values of finished rows beside one more score each, whose value is zero."""
    sinks = sinks * _LOG2_E
    highest = tl.maximum(peak, sinks)
    fade = tl.exp2(peak - highest)
    return tl.fma(total, fade, tl.exp2(sinks - highest)), values * fade[:, None]
