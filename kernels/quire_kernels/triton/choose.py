"""Choice of the next tokens on the device: the greatest logit, or a draw from a truncated distribution.

Promises: a fixed number of launches and no wait for the device; every sum is of integers, hence exact in any order: a
row's token is bitwise independent of the other rows, of the chunks and of the number of programs. Must not know:
requests.

The rule equals the engine's CPU sampler step by step: y = (x - max) / temperature; the top_k greatest y, with lower ids
first among equals; p = exp(y) / sum; weights w = floor(p * 2^52); the shortest run of most likely tokens whose weights
reach top_p of the sum, with lower ids first among equals; p >= min_p * max(p); the first id, in id order, whose
cumulative weight exceeds floor(u * total), with u from Philox4x32-10 of (seed, choice, position).

Everything but p is exact: given the same p the token is the same. p is a float32 quotient whose exponential and sum
each device rounds in its own way (the sum is exact here, in units of 2^-44 of the greatest term); it differs from the
CPU's by about 2^-22 of p. So a token differs from the CPU's only if u * total is within about 2^-22 * total of the
border between two tokens, if the mass up to some token equals top_p to about 2^-22, if two tokens' p are equal on one
device only and the nucleus ends between them, or if some p equals min_p * max(p) to about 2^-22. Temperature, top_k and
ties of top_k cause no differences.

The k-th greatest value, and the last value of a nucleus, are found by a radix search from the highest digit: a launch
sums, for each value of the next five bits, the tokens (or their mass) with this value; programs share only these 2^5
sums of a row. Among the tokens equal to the cut-off value, the lowest ids are kept; the last kept id is found as in the
draw: first the chunk by the chunks' sums, then the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.kernel_set import ChoiceRows
from quire_kernels.triton.candidates import (
    BINS,
    BITS,
    COUNTS,
    EXPS,
    K_DIGITS,
    K_TIES,
    P_DIGITS,
    P_TIES,
    SUMS,
    WEIGHTS,
    exp_total,
    exponentials,
    find,
    k_keys,
    measures_of,
    narrow,
    row_peak,
    row_sum,
    scaled,
    tie_of,
    uniform_of,
    wanted_mass,
    weights_of,
)

CHUNK = 4096  # tokens per program
_MAX_TOKENS = 1 << 18
_PART = tl.constexpr(128)  # tokens that are sorted into bins at once


@triton.jit
def peak_kernel(logits, logits_rows, peaks, places, finite, counts, num_tokens, CHUNK: tl.constexpr):  # noqa: PLR0917
    """Greatest logit of a chunk, the first token with it, whether all logits are finite. Grid (rows, chunks)."""
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < num_tokens
    x = tl.load(logits + tl.load(logits_rows + row) * num_tokens + ids, mask=inside, other=float("-inf"))
    peak = tl.max(x, 0)
    # No token equals a peak of NaN; such a row gets the last id, which is valid for the embedding.
    place = tl.min(tl.where(inside & (x == peak), ids, num_tokens - 1), 0)
    # The comparison is false for NaN too.
    wrong = tl.max(tl.where(inside & ((tl.abs(x) < float("inf")) == 0), 1, 0), 0)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(places + row * chunks + chunk, place)
    tl.store(finite + row * chunks + chunk, 1 - wrong)
    if chunk == 0:
        bins = tl.arange(0, 512)
        tl.store(counts + row * COUNTS + bins, tl.zeros([512], tl.int64), mask=bins < COUNTS)


@triton.jit
def _quarters(x):
    """Split [4 * _PART] into four tensors [_PART], in the order that needs no exchange between threads."""
    first, second = tl.split(tl.reshape(x, [2 * _PART, 2]))
    a, b = tl.split(tl.reshape(first, [_PART, 2]))
    c, d = tl.split(tl.reshape(second, [_PART, 2]))
    return a, b, c, d


@triton.jit
def _binned(digits, worth):
    return tl.where(digits[:, None] == tl.arange(0, BINS)[None, :], worth[:, None], 0)


# One kernel for all digits; by default Triton would specialize on the values 0 and 1.
@triton.jit(do_not_specialize=["digit"])
def digit_kernel(  # noqa: PLR0917
    logits, logits_rows, temperatures, limits, peaks, sums, counts, bounds, num_tokens, digit,
    MASS: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Add a chunk's tokens to the bins of one digit: counts by y for top-k, with MASS weights by p for top-p."""
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature, limit = tl.load(temperatures + row), tl.load(limits + row)
    unlimited = limit >= 1.0 if MASS else (limit <= 0) | (limit >= num_tokens)
    if (temperature == 0.0) | unlimited:
        return
    mine = counts + row * COUNTS
    peak, total = row_peak(peaks, row, chunks, CHUNKS), 1.0
    # The first digit has no prefix, and other programs are still filling its bins.
    prefix = tl.zeros([], tl.int32)
    if MASS:
        mine += K_DIGITS * BINS
        total = exp_total(sums, row, chunks, CHUNKS)
        shift = BITS * (P_DIGITS - 1 - digit)
        if digit > 0:
            prefix, _ = narrow(mine, wanted_mass(mine, limit), digit)
    else:
        shift = BITS * (K_DIGITS - 1 - digit)
        if digit > 0:
            prefix, _ = narrow(mine, limit.to(tl.int64), digit)
    held = tl.zeros([_PART, BINS], tl.int64)
    for start in tl.range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, num_tokens), 4 * _PART):
        ids = start + tl.arange(0, 4 * _PART)
        y = scaled(logits, logits_rows, row, ids, num_tokens, peak, temperature)
        if MASS:
            p = tl.div_rn(exponentials(y, ids, num_tokens, bounds + row * 4, TOP_K), total)
            keys, worth = p.to(tl.int32, bitcast=True), weights_of(p)
        else:
            keys, worth = k_keys(y), (ids < num_tokens).to(tl.int64)
        digits = (keys >> shift) & (BINS - 1)
        worth = tl.where((keys.to(tl.int64) >> (shift + BITS)) == prefix, worth, 0)
        d0, d1, d2, d3 = _quarters(digits)
        w0, w1, w2, w3 = _quarters(worth)
        held += _binned(d0, w0) + _binned(d1, w1) + _binned(d2, w2) + _binned(d3, w3)
    tl.atomic_add(mine + digit * BINS + tl.arange(0, BINS), tl.sum(held, 0), sem="relaxed")


@triton.jit
def sum_kernel(  # noqa: PLR0917
    logits, logits_rows, temperatures, limits, min_ps, peaks, sums, counts, bounds, num_tokens,
    WHAT: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sum WHAT over a chunk. Grid (rows, chunks)."""
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        return
    limit, total, tie = tl.load(limits + row), 0.0, 0
    if (WHAT == K_TIES) | (WHAT == P_TIES):
        tie, _ = tie_of(counts + row * COUNTS, limit, WHAT)
    if (WHAT == P_TIES) | (WHAT == WEIGHTS):
        total = exp_total(sums, row, chunks, CHUNKS)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    held = measures_of(
        logits, logits_rows, row, ids, num_tokens, row_peak(peaks, row, chunks, CHUNKS), temperature, total,
        bounds + row * 4, tie, tl.load(min_ps + row), WHAT, TOP_K, TOP_P,
    )  # fmt: skip
    tl.store(sums + (row * SUMS + WHAT) * chunks + chunk, tl.sum(held, 0))


@triton.jit
def bound_kernel(  # noqa: PLR0917
    logits, logits_rows, temperatures, limits, peaks, sums, counts, bounds, num_tokens, chunks,
    WHAT: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The key and the id of the last token that top-k or top-p keeps; key -1 where there is no limit. Grid (rows,)."""
    row = tl.program_id(0)
    temperature, limit = tl.load(temperatures + row), tl.load(limits + row)
    total = 0.0
    if WHAT == K_TIES:
        unlimited, bound = (limit <= 0) | (limit >= num_tokens), bounds + row * 4
    else:
        unlimited, bound = limit >= 1.0, bounds + row * 4 + 2
        total = exp_total(sums, row, chunks, CHUNKS)
    if (temperature == 0.0) | unlimited:
        tl.store(bound, -1)
        tl.store(bound + 1, -1)
        return
    tie, needed = tie_of(counts + row * COUNTS, limit, WHAT)
    last = find(
        logits, logits_rows, row, chunks, num_tokens, row_peak(peaks, row, chunks, CHUNKS), temperature, total,
        sums, bounds + row * 4, tie, 0.0, needed, WHAT, TOP_K, False, CHUNK, CHUNKS,
    )  # fmt: skip
    tl.store(bound, tie.to(tl.int64))
    tl.store(bound + 1, last.to(tl.int64))


@triton.jit
def token_kernel(  # noqa: PLR0917
    logits, logits_rows, temperatures, min_ps, seeds, choices, positions,
    peaks, places, finite, sums, bounds, token_ids, are_finite, possible, num_tokens, chunks,
    DRAWS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Each row's token. Grid (rows,)."""
    row = tl.program_id(0)
    at = tl.arange(0, CHUNKS)
    inside = at < chunks
    chunk_peaks = tl.load(peaks + row * chunks + at, mask=inside, other=float("-inf"))
    peak = tl.max(chunk_peaks, 0)
    place = tl.load(places + row * chunks + at, mask=inside & (chunk_peaks == peak), other=num_tokens - 1)
    tl.store(are_finite + row, tl.min(tl.load(finite + row * chunks + at, mask=inside, other=1), 0) == 1)
    tl.store(possible + row, peak > float("-inf"))
    tl.store(token_ids + row, tl.min(place, 0).to(tl.int64))
    if DRAWS:
        temperature = tl.load(temperatures + row)
        if temperature == 0.0:
            return
        uniform = uniform_of(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
        mass = row_sum(sums, row, chunks, WEIGHTS, CHUNKS)
        # The product may round up to the mass.
        target = tl.minimum((uniform * mass.to(tl.float64)).to(tl.int64), mass - 1)
        total = exp_total(sums, row, chunks, CHUNKS)
        token = find(
            logits, logits_rows, row, chunks, num_tokens, peak, temperature, total, sums, bounds + row * 4, 0,
            tl.load(min_ps + row), target + 1, WEIGHTS, TOP_K, TOP_P, CHUNK, CHUNKS,
        )  # fmt: skip
        tl.store(possible + row, (peak > float("-inf")) & (mass > 0))
        tl.store(token_ids + row, token.to(tl.int64))


def choose(logits: Tensor, rows: ChoiceRows, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """The set's `choose` op: ids [R] int64, finite [R] bool, possible [R] bool.

    `chunk`: tokens per program, a power of two of at least 512.
    """
    num_tokens, device = logits.shape[1], logits.device
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not 0 < num_tokens <= _MAX_TOKENS:
        raise ValueError(f"logits must be contiguous float32 of at most {_MAX_TOKENS} tokens")
    if chunk % (4 * _PART.value):
        raise ValueError(f"a chunk of {chunk} tokens does not divide into parts")
    num_rows, chunks = len(rows.logits_rows), triton.cdiv(num_tokens, chunk)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    are_finite, possible = torch.empty(2, num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return token_ids, are_finite, possible
    peaks = torch.empty(num_rows, chunks, dtype=torch.float32, device=device)
    places, finite = torch.empty(2, num_rows, chunks, dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, COUNTS.value, dtype=torch.int64, device=device)
    sums = torch.empty(num_rows, SUMS.value, chunks, dtype=torch.int64, device=device)
    bounds = torch.empty(num_rows, 4, dtype=torch.int64, device=device)
    grid, sizes = (num_rows, chunks), {"CHUNK": chunk, "CHUNKS": triton.next_power_of_2(chunks), "num_warps": 4}
    top_k, top_p = rows.draws and rows.limits_k, rows.draws and rows.limits_p
    of_row = logits, rows.logits_rows, rows.temperature

    def cut(limits: Tensor, mass: bool, what: int) -> None:
        for digit in range((P_DIGITS if mass else K_DIGITS).value):
            digit_kernel[grid](
                *of_row, limits, peaks, sums, counts, bounds, num_tokens, digit,
                MASS=mass, TOP_K=mass and top_k, **sizes,
            )  # fmt: skip
        add_up(limits, what)
        bound_kernel[num_rows,](
            *of_row, limits, peaks, sums, counts, bounds, num_tokens, chunks, WHAT=what, TOP_K=mass and top_k, **sizes
        )

    def add_up(limits: Tensor, what: int) -> None:
        sum_kernel[grid](
            *of_row, limits, rows.min_p, peaks, sums, counts, bounds, num_tokens,
            WHAT=what, TOP_K=top_k, TOP_P=top_p, **sizes,
        )  # fmt: skip

    peak_kernel[grid](
        logits, rows.logits_rows, peaks, places, finite, counts, num_tokens, CHUNK=chunk, num_warps=4
    )  # fmt: skip
    if top_k:
        cut(rows.top_k, False, K_TIES.value)
    if rows.draws:
        add_up(rows.min_p, EXPS.value)
    if top_p:
        cut(rows.top_p, True, P_TIES.value)
    if rows.draws:
        add_up(rows.min_p, WEIGHTS.value)
    token_kernel[num_rows,](
        *of_row, rows.min_p, rows.seed, rows.choice, rows.position,
        peaks, places, finite, sums, bounds, token_ids, are_finite, possible, num_tokens, chunks,
        DRAWS=rows.draws, TOP_K=top_k, TOP_P=top_p, **sizes,
    )  # fmt: skip
    return token_ids, are_finite, possible
