"""The C++ attention ops, for every instruction set of this CPU: definitions, poison, and rows bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from quire_kernels.cpu.kv_layout import UNIT, unsupported
from quire_kernels.cpu.variants import usable_variants
from quire_kernels.reference import REFERENCE
from support.cpu_attention import CPU, KV_TYPES, LAYER, NUM_LAYERS, Kernels, Sequences, shape_of

ROUNDING = 2.0**-8  # to bf16, relative, at most


@pytest.fixture(scope="module", params=usable_variants(), ids=lambda variant: variant.name)
def variant(request):
    return request.param


@pytest.fixture(scope="module", params=KV_TYPES)
def kernels(request, variant):
    return Kernels(variant, threads=1, kv_type=request.param)


@pytest.fixture(scope="module")
def two_threads(variant, kernels):
    return Kernels(variant, threads=2, kv_type=kernels.kv_type)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "block_size"),
    [
        (2, 2, 16, None, 16),
        (4, 2, 32, None, 16),
        (8, 2, 64, None, 32),
        (8, 1, 80, 50, 16),
        (6, 2, 128, 1, 16),
        (16, 1, 48, 129, 48),
        (4, 4, 128, 200, 64),
        (64, 1, 256, None, 16),
        (4, 2, 320, 90, 32),
        (16, 1, 512, None, 16),
    ],
)
def test_attention_computes_its_definition(*, kernels, heads, kv_heads, head_dim, window, block_size):
    """Whole prompts, single rows and slices behind a cached prefix in one call, in a pool full of NaN."""
    lengths = [1, 9, 300, 131, 64, 577] if heads <= 16 else [1, 9, 100, 70, 64, 90]
    sequences = Sequences(lengths, shape_of(heads, kv_heads, head_dim, window), block_size=block_size)
    starts = [0, 8, 0, 69, 37, 30] if heads > 16 else [0, 8, 0, 130, 37, 490]
    slices = [(i, start, lengths[i] - start) for i, start in enumerate(starts)]
    for (sequence, start, _), rows in zip(slices, sequences.attend(kernels, slices), strict=True):
        exact = sequences.exact(sequence, kernels.kv_type)[start:]
        error, rounding = (rows.double() - exact), (exact.bfloat16().double() - exact)
        assert error.abs().max() <= 1.5 * ROUNDING * exact.abs().max()
        # Weights are rounded once, outputs once: together no worse than two roundings of the exact result.
        assert error.square().mean().sqrt() <= 2 * rounding.square().mean().sqrt() + 1e-9


@pytest.mark.parametrize(
    ("heads", "window"), [((8, 1, 80), None), ((8, 1, 80), 1), ((3, 1, 256), 50), ((4, 2, 64), 530)], ids=str
)
def test_rows_that_see_both_ways_are_their_definition_and_keep_their_bits(kernels, two_threads, heads, window):
    """Prompts of one tile, of one segment and of three, beside each other and alone, by one thread and by two."""
    lengths = [1, 9, 300, 131, 1100, 64]
    sequences = Sequences(lengths, shape_of(*heads, window, bidirectional=True))
    whole = [(sequence, 0, length) for sequence, length in enumerate(lengths)]
    together = sequences.attend(kernels, whole)
    for slice_, rows in zip(whole, together, strict=True):
        exact = sequences.exact(slice_[0], kernels.kv_type)
        error, rounding = (rows.double() - exact), (exact.bfloat16().double() - exact)
        assert error.abs().max() <= 1.5 * ROUNDING * exact.abs().max()
        assert error.square().mean().sqrt() <= 2 * rounding.square().mean().sqrt() + 1e-9
        for ops in (kernels, two_threads):
            (alone,) = sequences.attend(ops, [slice_], seed=1)
            assert torch.equal(rows, alone)
    ends = [(sequence, max(0, length - 11), min(11, length)) for sequence, length in enumerate(lengths)]
    for rows, found in zip(together, sequences.attend(two_threads, ends), strict=True):
        assert torch.equal(rows[-len(found) :], found)


SINKS = torch.tensor([-3.0, 0.0, 1.5, 4.0, 80.0, -90.0, 2.0, 0.5])


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    "added", [{"softcap": 0.7}, {"softcap": 50.0}, {"sinks": SINKS}, {"softcap": 2.0, "sinks": SINKS}], ids=str
)
def test_softcaps_and_sinks_are_their_definition_and_keep_a_rows_bits(kernels, two_threads, added, window):
    lengths = [1, 9, 300, 131, 577, 64]
    sequences = Sequences(lengths, shape_of(8, 2, 64, window, **added), spread=3.0)
    starts = [0, 8, 0, 130, 490, 37]
    slices = [(i, start, lengths[i] - start) for i, start in enumerate(starts)]
    together = sequences.attend(kernels, slices)
    for slice_, rows in zip(slices, together, strict=True):
        sequence, start, count = slice_
        exact = sequences.exact(sequence, kernels.kv_type)[start:]
        error, rounding = (rows.double() - exact), (exact.bfloat16().double() - exact)
        assert error.abs().max() <= 1.5 * ROUNDING * exact.abs().max() + 1e-6
        assert error.square().mean().sqrt() <= 2 * rounding.square().mean().sqrt() + 1e-6
        (alone,) = sequences.attend(two_threads, [slice_])
        pieces = [(sequence, at, min(13, start + count - at)) for at in range(start, start + count, 13)]
        assert torch.equal(alone, rows)
        assert torch.equal(
            torch.cat([sequences.attend(kernels, [piece])[0] for piece in pieces[-3:]]),
            rows[pieces[-3:][0][1] - start :],
        )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_every_length_is_right(kernels, head_dim):
    length = 200
    sequences = Sequences([length], shape_of(4, 2, head_dim))
    exact = sequences.exact(0, kernels.kv_type)
    for position in range(length):
        (row,) = sequences.attend(kernels, [(0, position, 1)], seed=position)
        assert (row.double() - exact[position]).abs().max() <= 1.5 * ROUNDING * exact[position].abs().max(), position


def test_a_long_context_is_right(kernels):
    length = 4999
    sequences = Sequences([length], shape_of(2, 1, 64))
    (rows,) = sequences.attend(kernels, [(0, length - 20, 20)])
    exact = sequences.exact(0, kernels.kv_type, rows=20)
    error, rounding = (rows.double() - exact), (exact.bfloat16().double() - exact)
    assert error.square().mean().sqrt() <= 2 * rounding.square().mean().sqrt()


def test_peaked_scores_are_right(kernels):
    """Weights from e^-300 to 1, the peak anywhere: early, late, at the row itself."""
    length = 260
    sequences = Sequences([length], shape_of(4, 2, 64), spread=12.0)
    exact = sequences.exact(0, kernels.kv_type)
    (rows,) = sequences.attend(kernels, [(0, 0, length)])
    assert (rows.double() - exact).abs().max() <= 2 * ROUNDING * exact.abs().max()


@pytest.mark.parametrize("window", [None, 40, 700])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)], ids=str)
def test_a_row_does_not_depend_on_the_slice_it_is_computed_in(kernels, two_threads, heads, window):
    length = 1100
    sequences = Sequences([length], shape_of(*heads, 32, window))
    (whole,) = sequences.attend(kernels, [(0, 0, length)])
    source = random.Random(0)
    slices = [(start, 1) for start in (0, 1, 15, 16, 63, 64, 65, 511, 512, 513, 1023, 1024, length - 1)]
    for rows in (2, 3, 5, 16, 24, 25, 31, 64, 150, 600):
        slices += [(source.randrange(length - rows), rows), (length - rows, rows)]
    for start, rows in slices:
        for each in (kernels, two_threads):
            (result,) = sequences.attend(each, [(0, start, rows)], seed=start)
            assert torch.equal(result, whole[start : start + rows]), f"rows {start}..{start + rows}"


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("heads", [(6, 2, 48), (2, 2, 64)], ids=str)
def test_a_row_has_the_same_bits_in_a_chunk_of_any_size(kernels, heads, window):
    """Chunks of 1 to 70 rows at the start, at the end and anywhere; the sign of a zero is a bit too."""
    length = 210
    sequences = Sequences([length], shape_of(*heads, window))
    underflow(sequences)
    (whole,) = sequences.attend(kernels, [(0, 0, length)])
    source = random.Random(0)
    for rows in range(1, 71):
        starts = (0, source.randrange(length - rows), length - rows)
        chunks = sequences.attend(kernels, [(0, start, rows) for start in starts], seed=rows)
        for start, chunk in zip(starts, chunks, strict=True):
            assert torch.equal(chunk.view(torch.int16), whole[start : start + rows].view(torch.int16)), (start, rows)


def underflow(sequences):
    """Lets some products, weights, sums and results of the first sequence be below the least normal number."""
    q, k, v = (x[0] for x in (sequences.q, sequences.k, sequences.v))
    q[::7], v[:, 0] = q[::7] * 20, v[:, 0] * 2.0**-120
    q[::5, 0, 3], k[::4, 0, 3], v[::3, 1, 5] = 1e-39, -1e-38, -0.0


@pytest.mark.parametrize("window", [None, 33])
def test_a_row_does_not_depend_on_its_neighbours_or_the_threads(variant, window):
    """40 sequences of all lengths in one call, in two orders, against each alone, by 1, 2 and 3 workers."""
    source = random.Random(0)
    lengths = [source.choice((1, 5, 40, 64, 129, 200, 600)) for _ in range(40)]
    sequences = Sequences(lengths, shape_of(4, 2, 16, window))
    slices = [(i, source.randrange(length), 0) for i, length in enumerate(lengths)]
    slices = [(i, start, source.randint(1, lengths[i] - start)) for i, start, _ in slices]
    for kv_type in KV_TYPES:
        kernels = Kernels(variant, threads=1, kv_type=kv_type)
        alone = [sequences.attend(kernels, [one])[0] for one in slices]
        for threads in (1, 2, 3):
            kernels = Kernels(variant, threads=threads, kv_type=kv_type)
            for order in (slices, slices[::-1], slices[7:19], slices[3:4]):
                for one, result in zip(order, sequences.attend(kernels, order, seed=5), strict=True):
                    assert torch.equal(result, alone[slices.index(one)]), f"slice {one}, {threads} threads"


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)], ids=str)
def test_a_row_does_not_see_those_after_it_in_the_same_call(kernels, heads):
    """Rows before a position whose key and value are not numbers, in the call that computes them together."""
    length = 150
    sequences = Sequences([length], shape_of(*heads, 48))
    (clean,) = sequences.attend(kernels, [(0, 0, length)])
    for first in (1, 2, 7, 16, 63, 64, 65, 100, 129, length - 1):
        broken = Sequences([length], shape_of(*heads, 48))
        broken.k[0][first:], broken.v[0][first:] = torch.nan, torch.inf
        (rows,) = broken.attend(kernels, [(0, 0, length)])
        assert torch.equal(rows[:first], clean[:first]), first
        assert not torch.isfinite(rows[first:]).all(dim=-1).any(), first


def test_more_workers_than_cores_come_and_go(variant):
    """Short calls in a row: a worker may find a call over, or be in the middle of it when the others are through."""
    sequences = Sequences([3, 70, 600], shape_of(4, 2, 16))
    slices = [(0, 2, 1), (1, 60, 10), (2, 599, 1)]
    alone = sequences.attend(Kernels(variant, threads=1, kv_type="bf16"), slices)
    kernels = Kernels(variant, threads=9, kv_type="bf16")
    pool, step = sequences.fill(kernels, slices)
    q = torch.cat([sequences.q[sequence][start : start + rows] for sequence, start, rows in slices])
    for _ in range(3000):
        rows = kernels.ops.attention(q, sequences.shape, pool, LAYER, step)
        assert torch.equal(rows, torch.cat(alone))


def test_the_block_size_does_not_matter(kernels):
    shape = shape_of(4, 2, 32)
    results = [
        Sequences([333], shape, block_size=block_size).attend(kernels, [(0, 0, 333)])[0]
        for block_size in (16, 32, 48, 64, 256)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("window", [None, 37])
def test_unused_slots_blocks_and_table_entries_may_hold_anything(kernels, window):
    lengths = [71, 150, 16, 33]
    sequences = Sequences(lengths, shape_of(4, 2, 32, window))
    slices = [(0, 50, 21), (1, 149, 1), (2, 0, 16), (3, 32, 1)]
    expected = sequences.attend(kernels, slices, poison=0)
    for poison in (0xFF, 0x7F, 0x80):
        for result, wanted in zip(sequences.attend(kernels, slices, poison=poison), expected, strict=True):
            assert torch.equal(result, wanted)


def test_later_rows_of_the_same_slice_are_not_looked_at(kernels):
    """A NaN in a later row's key and value, in the same tile or pair, does not reach an earlier row."""
    sequences = Sequences([90], shape_of(4, 2, 32))
    (clean,) = sequences.attend(kernels, [(0, 0, 90)])
    sequences.k[0][45:], sequences.v[0][45:], sequences.q[0][45:] = torch.nan, torch.nan, torch.nan
    (result,) = sequences.attend(kernels, [(0, 0, 90)])
    assert torch.equal(result[:45], clean[:45])
    assert result[45:].isnan().all()


def test_positions_before_the_window_are_not_looked_at(kernels):
    """Their blocks may have been given away: the table's entries there need not even exist."""
    sequences = Sequences([200], shape_of(4, 2, 32, window=50))
    (clean,) = sequences.attend(kernels, [(0, 199, 1)])
    sequences.k[0][:150], sequences.v[0][:150] = torch.nan, torch.nan
    (result,) = sequences.attend(kernels, [(0, 199, 1)], lost_blocks=9)
    assert torch.equal(result, clean)


def test_a_copied_block_serves_as_the_original(kernels):
    sequences = Sequences([64], shape_of(4, 2, 32))
    pool, step = sequences.fill(kernels, [(0, 63, 1)], spare_blocks=4)
    expected = kernels.ops.attention(sequences.q[0][63:], sequences.shape, pool, LAYER, step)
    used = step.block_tables[0].long()
    spare = torch.tensor([b for b in range(pool.shape[0]) if b not in used.tolist()][-len(used) :])
    pool[spare] = pool[used]
    pool.view(torch.uint8)[used] = 0xFF
    step.block_tables[0] = spare.int()
    assert torch.equal(kernels.ops.attention(sequences.q[0][63:], sequences.shape, pool, LAYER, step), expected)


def test_the_pool_is_zeroed_block_major_and_as_large_as_announced(kernels):
    pool = kernels.ops.new_kv(6, 3, 2, 32, 48, torch.bfloat16, CPU)
    assert pool.shape[0] == 6
    assert not pool.any()
    assert pool[2].is_contiguous()
    assert pool[2].nbytes == kernels.ops.kv_block_bytes(3, 2, 32, 48, torch.bfloat16)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "word"),
    [(24, 16, "head_dim 24"), (528, 16, "head_dim 528"), (64, 8, "block_size 8"), (64, 24, "block_size 24")],
)
def test_a_pool_that_the_kernels_cannot_serve_is_refused(kernels, head_dim, block_size, word):
    assert word in unsupported(head_dim=head_dim, block_size=block_size)
    assert unsupported(head_dim=UNIT, block_size=UNIT) is None
    sizes = (2, 1, block_size, head_dim, torch.bfloat16)
    with pytest.raises(ValueError, match=word):
        kernels.ops.new_kv(9, *sizes, CPU)
    with pytest.raises(ValueError, match=word):
        kernels.ops.kv_block_bytes(*sizes)
    with pytest.raises(ValueError, match="float32"):
        kernels.ops.kv_block_bytes(2, 1, 16, 64, torch.float32)
    with pytest.raises(ValueError, match="cuda"):
        kernels.ops.new_kv(9, 2, 1, 16, 64, torch.bfloat16, torch.device("cuda"))


def test_indices_outside_the_pool_raise_and_touch_nothing(kernels):
    sequences = Sequences([40], shape_of(4, 2, 32))
    pool, step = sequences.fill(kernels, [(0, 39, 1)])
    for entry in (-1, pool.shape[0]):
        kept = step.block_tables[0, 1].item()
        step.block_tables[0, 1] = entry
        with pytest.raises(IndexError):
            kernels.ops.attention(sequences.q[0][39:], sequences.shape, pool, LAYER, step)
        step.block_tables[0, 1] = kept
    qkv, rope = torch.zeros(1, 8 * 32).bfloat16(), torch.zeros(40, 32)
    before = pool.clone()
    for slots, positions in ((-1, 0), (pool.shape[0] * 16, 0), (0, 40), (0, -1)):
        step.kv_slots[0], step.positions[0] = slots, positions
        with pytest.raises(IndexError):
            kernels.ops.rope_write(qkv, rope, sequences.shape, pool, LAYER, step)
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8))


def test_what_was_made_for_another_model_is_refused(kernels):
    sequences = Sequences([40], shape_of(4, 2, 32))
    pool, step = sequences.fill(kernels, [(0, 39, 1)])
    q, ops = sequences.q[0][39:], kernels.ops
    with pytest.raises(ValueError, match="another model"):
        ops.attention(q, sequences.shape, pool, NUM_LAYERS, step)
    with pytest.raises(ValueError, match="another model"):
        ops.attention(q[:, :, :16].contiguous(), shape_of(4, 2, 16), pool, LAYER, step)
    with pytest.raises(ValueError, match="q must be"):
        ops.attention(q.float(), sequences.shape, pool, LAYER, step)
    with pytest.raises(ValueError, match="not a pool"):
        ops.attention(q, sequences.shape, pool.float(), LAYER, step)
    with pytest.raises(ValueError, match="not a pool"):
        ops.attention(q, sequences.shape, pool[0], LAYER, step)
    with pytest.raises(ValueError, match="not a pool"):
        ops.attention(q, sequences.shape, REFERENCE.new_kv(9, 2, 2, 16, 32, torch.bfloat16, CPU), LAYER, step)
