"""Values of a token that the launches of a choice compute: its order, whether it is a candidate, its weight.

Promises: everything but a probability is exact; sums are of integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

BITS = tl.constexpr(5)  # bits of a digit
BINS = tl.constexpr(32)
K_DIGITS = tl.constexpr(7)  # for keys of 31 bits, in the order of y <= 0
P_DIGITS = tl.constexpr(6)  # for keys of 30 bits, in the order of 0 <= p <= 1
COUNTS = tl.constexpr((7 + 6) * 32)  # bins of a row for all digits
EXP_UNIT = tl.constexpr(float(1 << 44))  # sums over 2^18 tokens stay below 2^63
UNIT = tl.constexpr(float(1 << 52))
# The sums over a row's chunks: number of tokens equal to the k-th value, exponentials, number of tokens equal to the
# nucleus' last probability, weights of the draw.
K_TIES, EXPS, P_TIES, WEIGHTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SUMS = tl.constexpr(4)


@triton.jit
def row_peak(peaks, row, chunks, CHUNKS: tl.constexpr):
    at = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + row * chunks + at, mask=at < chunks, other=float("-inf")), 0)


@triton.jit
def row_sum(sums, row, chunks, WHAT: tl.constexpr, CHUNKS: tl.constexpr):
    at = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(sums + (row * SUMS + WHAT) * chunks + at, mask=at < chunks, other=0), 0)


@triton.jit
def exp_total(sums, row, chunks, CHUNKS: tl.constexpr):
    """The sum of a row's exponentials as float32; the unit is a power of two, so the only rounding is the integer's."""
    return row_sum(sums, row, chunks, EXPS, CHUNKS).to(tl.float32) * (1.0 / EXP_UNIT)


@triton.jit
def k_keys(y):
    """31-bit integers in the order of y <= 0."""
    return 0x7FFFFFFF - (y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def weights_of(p):
    return (p * UNIT).to(tl.int64)


@triton.jit
def is_kept(keys, ids, bounds):
    """Whether tokens are at or before the last kept one in order; `bounds` holds its key and id."""
    key, last = tl.load(bounds).to(tl.int32), tl.load(bounds + 1)
    return (keys > key) | ((keys == key) & (ids <= last))


@triton.jit
def uniform_of(seed, choice, position):
    """The draw for int64 (seed, choice, position): a double in [0, 1), a multiple of 2^-53.

    Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). The seed is the
    key; the counter's low half is the position, its high half the choice; all little word first. The number is the
    upper 53 bits of the first two words.
    """
    low, high, _, _ = tl.philox(
        seed, position.to(tl.uint32), (position >> 32).to(tl.uint32),
        choice.to(tl.uint32), (choice >> 32).to(tl.uint32),
    )  # fmt: skip
    number = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
    return number.to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def narrow(counts, wanted, digits):
    """The first `digits` digits of the largest key whose suffix sum reaches `wanted`, and the rest of `wanted`.

    The suffix sum of a key is the sum over all keys at or above it. The rest is the part of `wanted` that keys with
    these digits contribute.
    """
    bins = tl.arange(0, BINS)
    prefix = tl.zeros([], tl.int32)
    for digit in range(digits):
        held = tl.load(counts + digit * BINS + bins)
        from_here = tl.sum(held, 0) - tl.cumsum(held, 0) + held
        chosen = tl.max(tl.where(from_here >= wanted, bins, 0), 0)
        wanted -= tl.sum(tl.where(bins > chosen, held, 0), 0)
        prefix = prefix * BINS + chosen
    return prefix, wanted


@triton.jit
def wanted_mass(counts, top_p):
    """top_p times the sum of all weights (of the first digit's bins), rounded up to an integer of at least 1."""
    total = tl.sum(tl.load(counts + tl.arange(0, BINS)), 0)
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def scaled(logits, logits_rows, row, ids, num_tokens, peak, temperature):  # noqa: PLR0917
    """y of some tokens: minus infinity outside the vocabulary."""
    values = logits + tl.load(logits_rows + row) * num_tokens
    return tl.div_rn(tl.load(values + ids, mask=ids < num_tokens, other=float("-inf")) - peak, temperature)


@triton.jit
def exponentials(y, ids, num_tokens, bounds, TOP_K: tl.constexpr):
    kept = ids < num_tokens
    if TOP_K:
        kept &= is_kept(k_keys(y), ids, bounds)
    return tl.where(kept, tl.exp(y), 0.0)


@triton.jit
def measures_of(  # noqa: PLR0917
    logits, logits_rows, row, ids, num_tokens, peak, temperature, total, bounds, tie, min_p,
    WHAT: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """The terms of the sum WHAT, token by token; `tie` is the value whose tokens are counted."""
    y = scaled(logits, logits_rows, row, ids, num_tokens, peak, temperature)
    if WHAT == K_TIES:
        return ((ids < num_tokens) & (k_keys(y) == tie)).to(tl.int64)
    e = exponentials(y, ids, num_tokens, bounds, TOP_K)
    if WHAT == EXPS:
        return (e * EXP_UNIT).to(tl.int64)
    p = tl.div_rn(e, total)
    keys = p.to(tl.int32, bitcast=True)
    if WHAT == P_TIES:
        return ((ids < num_tokens) & (keys == tie)).to(tl.int64)
    # The most likely token's exponential is 1.
    kept = p >= min_p * tl.div_rn(tl.full((), 1.0, tl.float32), total)
    if TOP_P:
        kept &= is_kept(keys, ids, bounds + 2)
    return tl.where(kept, weights_of(p), 0)


@triton.jit
def tie_of(counts, limit, WHAT: tl.constexpr):
    """The value at which a row's tokens are cut off, and how many of the tokens with this value are kept."""
    if WHAT == K_TIES:
        key, missing = narrow(counts, limit.to(tl.int64), K_DIGITS)
    else:
        counts += K_DIGITS * BINS
        key, missing = narrow(counts, wanted_mass(counts, limit), P_DIGITS)
        each = tl.maximum(weights_of(key.to(tl.float32, bitcast=True)), 1)
        missing = (missing + each - 1) // each
    return key, missing


@triton.jit
def find(  # noqa: PLR0917
    logits, logits_rows, row, chunks, num_tokens, peak, temperature, total, sums, bounds, tie, min_p, needed,
    WHAT: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The first id where the cumulative sum of WHAT reaches `needed`; the chunks' sums give its chunk."""
    at = tl.arange(0, CHUNKS)
    held = tl.load(sums + (row * SUMS + WHAT) * chunks + at, mask=at < chunks, other=0)
    chunk = tl.minimum(tl.sum(((tl.cumsum(held, 0) < needed) & (at < chunks)).to(tl.int32), 0), chunks - 1)
    before = tl.sum(tl.where(at < chunk, held, 0), 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    measures = measures_of(
        logits, logits_rows, row, ids, num_tokens, peak, temperature, total, bounds, tie, min_p, WHAT, TOP_K, TOP_P
    )
    index = tl.sum((tl.cumsum(measures, 0) + before < needed).to(tl.int32), 0)
    return tl.minimum(chunk * CHUNK + index, num_tokens - 1)
