"""The products of a decode layer, as launches that begin while the one before them still computes.

Promises: a program reads nothing but weights before it waits for the launch before, and stores nothing; every path
through a kernel waits, so a launch ends after all before it. The order of a sum depends on the weight alone, whatever
the number of rows is.

With programmatic dependent launch (PDL, compute capability 9.0 and newer) the programs of a launch start as soon as all
programs of the launch before have said so, which these do at once. Until it has ended they load the first columns of
their weights into registers and the others into the L2 cache. So the memory is read on from one launch to the next.

Weights are the tall side of each product and the step's rows the other one, as columns of 16 or 32: a decode reads each
weight once and computes little. Tiles of fewer than 64 rows of weights, or of two warps, are products of mma.sync on
every GPU: the same instruction on the same operands for any number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire_kernels.triton.activation import activated
from quire_kernels.triton.rope_write import norm_halves, write_halves
from quire_kernels.triton.softmax import join_parts, with_sinks

_VARYING = ("layer", "num_rows", "num_squares", "max_parts")
_VIEWS = ("positions", "kv_slots", "context_lens")  # parts of one packed buffer, with any alignment
_LINE = tl.constexpr(64)  # numbers of two bytes in a line of the L2 cache
_LINES = tl.constexpr(8)  # lines of a row that a program asks for at once
_SQUARES = tl.constexpr(64)  # partial sums that are added up at once


@triton.jit
def prefetch_rows(at_rows, begin, depth):
    """Ask for the columns from `begin` on of rows of weights, given by their addresses, in the L2 cache."""
    for start in tl.range(begin, depth, _LINE * _LINES):
        columns = tl.minimum(start + tl.arange(0, _LINES) * _LINE, depth - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(at_rows[:, None] + columns[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def inverse_roots(squares, rows, num_rows, num_squares, width, eps, ROWS: tl.constexpr):  # noqa: PLR0917
    """1 / sqrt(mean square + eps) of rows, from the partial sums [num_squares, num_rows] of their squares."""
    total = tl.zeros([ROWS], tl.float32)
    for at in tl.range(0, num_squares, _SQUARES):
        parts = at + tl.arange(0, _SQUARES)
        there = (parts < num_squares)[:, None] & (rows < num_rows)[None, :]
        total += tl.sum(tl.load(squares + parts[:, None] * num_rows + rows[None, :], mask=there, other=0.0), 0)
    one = tl.full([ROWS], 1.0, tl.float32)
    return tl.div_rn(one, tl.sqrt_rn(tl.div_rn(total, width.to(tl.float32)) + eps))


@triton.jit
def normed_tile(x, norm, rows, columns, inverse, num_rows, width, WIDE: tl.constexpr):  # noqa: PLR0917
    """Columns of normed rows [ROWS, BLOCK_K], rounded as `rms_norm_kernel` does."""
    dtype: tl.constexpr = x.dtype.element_ty
    inside = columns < width
    at = x + rows.to(tl.int64)[:, None] * width + columns[None, :]
    wide = tl.load(at, mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    scale = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    value = wide * inverse[:, None]
    if not WIDE:
        value = value.to(dtype).to(tl.float32)
    return (scale[None, :] * value).to(dtype)


@triton.jit
def square_sums(x, squares, width, WIDTH: tl.constexpr, AHEAD: tl.constexpr):
    """The sums of squares of the rows that the first layer gets. Programs: (rows,)."""
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    row, columns = tl.program_id(0), tl.arange(0, WIDTH)
    values = tl.load(x + row.to(tl.int64) * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(squares + row, tl.sum(values * values, 0))


@triton.jit
def turned_halves(  # noqa: PLR0917
    first, second, is_query, rope, at_positions, q_norm, k_norm, half, held, exists, eps,
    stored: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return both halves of a query or key head [ROWS, HALF], normed and rotated by the rows' positions."""
    if NORM_Q:
        chosen = is_query & exists[:, None]
        first, second = norm_halves(first, second, chosen, q_norm, half, held, eps, stored, HEAD_DIM)
    if NORM_K:
        chosen = (is_query == 0) & exists[:, None]
        first, second = norm_halves(first, second, chosen, k_norm, half, held, eps, stored, HEAD_DIM)
    angles = rope + tl.load(at_positions, mask=exists, other=0)[:, None] * HEAD_DIM + half[None, :]
    turned = exists[:, None] & held[None, :]
    cos = tl.load(angles, mask=turned, other=0.0)
    sin = tl.load(angles + HEAD_DIM // 2, mask=turned, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VIEWS)
def chained_qkv(  # noqa: PLR0917
    x,  # [T, depth]
    squares,  # [num_squares, T] float32
    norm,  # [depth]
    weight,  # [(GROUP + 2) * KV_HEADS * HEAD_DIM, depth]
    bias,  # [(GROUP + 2) * KV_HEADS * HEAD_DIM]
    rope,  # [P, HEAD_DIM] float32: cosines, then sines
    positions,  # [T] int64
    kv_slots,  # [T] int64
    q_norm,  # [HEAD_DIM]
    k_norm,  # [HEAD_DIM]
    q,  # [T, GROUP * KV_HEADS, HEAD_DIM]
    kv,  # the pool
    layer,
    num_rows,
    num_squares,
    depth,
    eps,
    head_eps,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEAD: tl.constexpr,
    KV_HALF: tl.constexpr,
    KV_LAYER: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One head of ROWS rows: projected, normed and rotated, to q or to the pool. Programs: (heads, tiles of rows).

    Both halves of a head are in one program, as two products, since its norm and its rotation need both.
    """
    if AHEAD:
        gdc_launch_dependents()
    head, half, ks = tl.program_id(0), tl.arange(0, HALF), tl.arange(0, BLOCK_K)
    held = half < HEAD_DIM // 2
    of_first = weight + (head * HEAD_DIM + tl.minimum(half, HEAD_DIM // 2 - 1)).to(tl.int64) * depth
    of_second = of_first + (HEAD_DIM // 2) * depth
    there = held[:, None] & (ks < depth)[None, :]
    low = tl.load(of_first[:, None] + ks[None, :], mask=there, other=0.0)
    high = tl.load(of_second[:, None] + ks[None, :], mask=there, other=0.0)
    if AHEAD:
        prefetch_rows(of_first, BLOCK_K, depth)
        prefetch_rows(of_second, BLOCK_K, depth)
        gdc_wait()

    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inverse = inverse_roots(squares, rows, num_rows, num_squares, depth, eps, ROWS)
    a = tl.trans(normed_tile(x, norm, rows, ks, inverse, num_rows, depth, WIDE))
    first, second = tl.dot(low, a), tl.dot(high, a)
    for k in tl.range(BLOCK_K, depth, BLOCK_K, num_stages=STAGES):
        columns = k + ks
        there = held[:, None] & (columns < depth)[None, :]
        low = tl.load(of_first[:, None] + columns[None, :], mask=there, other=0.0)
        high = tl.load(of_second[:, None] + columns[None, :], mask=there, other=0.0)
        a = tl.trans(normed_tile(x, norm, rows, columns, inverse, num_rows, depth, WIDE))
        first, second = tl.dot(low, a, first), tl.dot(high, a, second)
    if HAS_BIAS:
        of_head = bias + head * HEAD_DIM + half
        first += tl.load(of_head, mask=held, other=0.0).to(tl.float32)[:, None]
        second += tl.load(of_head + HEAD_DIM // 2, mask=held, other=0.0).to(tl.float32)[:, None]

    stored: tl.constexpr = q.dtype.element_ty
    first, second = tl.trans(first).to(stored).to(tl.float32), tl.trans(second).to(stored).to(tl.float32)
    exists = rows < num_rows
    if head < (GROUP + 1) * KV_HEADS:
        first, second = turned_halves(
            first, second, head < GROUP * KV_HEADS, rope, positions + rows, q_norm, k_norm, half, held, exists,
            head_eps, stored, NORM_Q, NORM_K, HEAD_DIM,
        )  # fmt: skip
    if head < GROUP * KV_HEADS:
        at = q + rows.to(tl.int64)[:, None] * (GROUP * KV_HEADS * HEAD_DIM) + head * HEAD_DIM + half[None, :]
        tl.store(at, first.to(stored), mask=exists[:, None] & held[None, :])
        tl.store(at + HEAD_DIM // 2, second.to(stored), mask=exists[:, None] & held[None, :])
    else:
        slots = tl.load(kv_slots + rows, mask=exists, other=0)
        key_head = (head - GROUP * KV_HEADS) % KV_HEADS
        is_value = (head >= (GROUP + 1) * KV_HEADS).to(tl.int32)
        runs = slots // PAGE * KV_BLOCK + layer * KV_LAYER + is_value * KV_HALF + key_head * KV_HEAD
        write_halves(
            kv, runs, slots % PAGE, first.to(stored), second.to(stored), half, held, exists, PAGE, HEAD_DIM, FP8
        )


@triton.jit(do_not_specialize=_VARYING)
def chained_gate_up(  # noqa: PLR0917
    x,  # [T, depth]
    squares,  # [num_squares, T] float32
    norm,  # [depth]
    weight,  # [2 * width, depth]: the gate's rows, then up's
    bias,  # [2 * width]
    out,  # [T, width]
    num_rows,
    num_squares,
    depth,
    width,
    eps,
    ACTIVATION: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """BLOCK_W columns of the activated gate times up, of ROWS normed rows. Programs: (tiles of columns, of rows)."""
    if AHEAD:
        gdc_launch_dependents()
    outputs, ks = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_K)
    kept = outputs < width
    of_gate = weight + tl.minimum(outputs, width - 1).to(tl.int64) * depth
    of_up = of_gate + width.to(tl.int64) * depth
    there = kept[:, None] & (ks < depth)[None, :]
    low = tl.load(of_gate[:, None] + ks[None, :], mask=there, other=0.0)
    high = tl.load(of_up[:, None] + ks[None, :], mask=there, other=0.0)
    if AHEAD:
        prefetch_rows(of_gate, BLOCK_K, depth)
        prefetch_rows(of_up, BLOCK_K, depth)
        gdc_wait()

    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inverse = inverse_roots(squares, rows, num_rows, num_squares, depth, eps, ROWS)
    a = tl.trans(normed_tile(x, norm, rows, ks, inverse, num_rows, depth, WIDE))
    gate, up = tl.dot(low, a), tl.dot(high, a)
    for k in tl.range(BLOCK_K, depth, BLOCK_K, num_stages=STAGES):
        columns = k + ks
        there = kept[:, None] & (columns < depth)[None, :]
        low = tl.load(of_gate[:, None] + columns[None, :], mask=there, other=0.0)
        high = tl.load(of_up[:, None] + columns[None, :], mask=there, other=0.0)
        a = tl.trans(normed_tile(x, norm, rows, columns, inverse, num_rows, depth, WIDE))
        gate, up = tl.dot(low, a, gate), tl.dot(high, a, up)
    if HAS_BIAS:
        gate += tl.load(bias + outputs, mask=kept, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + width + outputs, mask=kept, other=0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    value = activated(gate, up, ACTIVATION).to(dtype)
    at = out + rows.to(tl.int64)[None, :] * width + outputs[:, None]
    tl.store(at, value, mask=kept[:, None] & (rows < num_rows)[None, :])


@triton.jit
def _add(  # noqa: PLR0917
    total, bias, residual, squares, tile, outputs, rows, num_rows, width, scale, HAS_BIAS: tl.constexpr
):
    """residual += scale * the sums [BLOCK_W, ROWS] (+ bias), and the squares of what is then there."""
    kept = outputs < width
    inside = kept[:, None] & (rows < num_rows)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=kept, other=0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = residual.dtype.element_ty
    at = residual + rows.to(tl.int64)[None, :] * width + outputs[:, None]
    before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = (before + scale * total.to(dtype).to(tl.float32)).to(dtype)
    tl.store(at, value, mask=inside)
    wide = value.to(tl.float32)
    tl.store(squares + tile * num_rows + rows, tl.sum(wide * wide, 0), mask=rows < num_rows)


@triton.jit(do_not_specialize=_VARYING)
def chained_add(  # noqa: PLR0917
    a,  # [T, depth]
    weight,  # [width, depth]
    bias,  # [width]
    residual,  # [T, width]
    squares,  # [tiles of columns, T] float32
    num_rows,
    depth,
    width,
    scale,
    HAS_BIAS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """residual += scale * a projection of a, in BLOCK_W columns. Programs: (tiles of columns, of rows)."""
    if AHEAD:
        gdc_launch_dependents()
    tile, ks = tl.program_id(0), tl.arange(0, BLOCK_K)
    outputs = tile * BLOCK_W + tl.arange(0, BLOCK_W)
    kept = outputs < width
    of_outputs = weight + tl.minimum(outputs, width - 1).to(tl.int64) * depth
    w = tl.load(of_outputs[:, None] + ks[None, :], mask=kept[:, None] & (ks < depth)[None, :], other=0.0)
    if AHEAD:
        prefetch_rows(of_outputs, BLOCK_K, depth)
        gdc_wait()

    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = (rows < num_rows)[:, None]
    of_rows = a + rows.to(tl.int64)[:, None] * depth
    x = tl.load(of_rows + ks[None, :], mask=exists & (ks < depth)[None, :], other=0.0)
    total = tl.dot(w, tl.trans(x))
    for k in tl.range(BLOCK_K, depth, BLOCK_K, num_stages=STAGES):
        columns = k + ks
        inside = (columns < depth)[None, :]
        w = tl.load(of_outputs[:, None] + columns[None, :], mask=kept[:, None] & inside, other=0.0)
        x = tl.load(of_rows + columns[None, :], mask=exists & inside, other=0.0)
        total = tl.dot(w, tl.trans(x), total)
    _add(total, bias, residual, squares, tile, outputs, rows, num_rows, width, scale, HAS_BIAS)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VIEWS)
def chained_join_add(  # noqa: PLR0917
    a,  # [T, HEADS, HEAD_DIM], of rows whose keys are one part
    part_values,  # [T, HEADS, max_parts, HEAD_DIM] float32
    part_sums,  # [2 (peak, total), T, HEADS, max_parts] float32
    context_lens,  # [T]
    sinks,  # [HEADS] float32, or None
    weight,  # [width, HEADS * HEAD_DIM]
    bias,  # [width]
    residual,  # [T, width]
    squares,  # [tiles of columns, T] float32
    num_rows,
    width,
    max_parts,
    scale,
    HAS_BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """`chained_add` of attention that is still in parts, of one row. Programs: (tiles of columns, rows).

    All weights of a program are loaded before the wait. They are multiplied without matrix instructions, as the parts
    of all heads can be joined at once in that form alone.
    """
    if AHEAD:
        gdc_launch_dependents()
    tile, heads, dims = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, HEAD_DIM)
    outputs = tile * BLOCK_W + tl.arange(0, BLOCK_W)
    place = heads[:, None] * HEAD_DIM + dims[None, :]
    at_weights = weight + outputs.to(tl.int64)[:, None, None] * (HEADS * HEAD_DIM) + place[None, :, :]
    w = tl.load(at_weights, mask=(outputs < width)[:, None, None], other=0.0)
    if AHEAD:
        gdc_wait()

    row = tl.program_id(1)
    length = tl.load(context_lens + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // SPLIT
    parts = tl.cdiv(length, SPLIT) - first
    dtype: tl.constexpr = a.dtype.element_ty
    at = (row * HEADS + heads) * max_parts
    totals = num_rows * HEADS * max_parts
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    values = tl.zeros([HEADS, HEAD_DIM], tl.float32)
    if parts > 1:
        for slot in range(0, parts):
            part = tl.load(part_values + (at + slot).to(tl.int64)[:, None] * HEAD_DIM + dims[None, :])
            part_peak, part_total = tl.load(part_sums + at + slot), tl.load(part_sums + totals + at + slot)
            peak, total, values = join_parts(peak, total, values, part_peak, part_total, part)
        if SINKS:
            total, values = with_sinks(peak, total, values, tl.load(sinks + heads))
        values = values / total[:, None]
    else:
        values = tl.load(a + row.to(tl.int64) * (HEADS * HEAD_DIM) + place).to(tl.float32)
    x = values.to(dtype).to(tl.float32)
    sums = tl.sum(tl.sum(w.to(tl.float32) * x[None, :, :], 2), 1)
    _add(sums[:, None], bias, residual, squares, tile, outputs, row + tl.arange(0, 1), num_rows, width, scale, HAS_BIAS)
