"""Paged attention, rotary embedding and the pool: definitions, and independence of rows, bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from quire_kernels.kernel_set import AttentionShape
from quire_kernels.reference import REFERENCE
from support.cpu_attention import textbook_weights
from support.model_steps import DEVICES, Blocks, batch_of, input_of, scheduled, step_at

NUM_LAYERS, LAYER = 3, 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _shape(heads: int = 4, kv_heads: int = 2, head_dim: int = 32, window: int | None = None) -> AttentionShape:
    return AttentionShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, window=window
    )


class _Sequences:
    """Sequences with random queries, keys and values, of which slices can be attended to in a pool full of NaN."""

    def __init__(self, lengths, shape, dtype=torch.float32, device="cpu", *, block_size=16, seed=0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, shape.head_dim, generator=generator).to(device, dtype)

        self.shape, self.dtype, self.device, self.block_size = shape, dtype, torch.device(device), block_size
        self.lengths = lengths
        self.q = [normal(length, shape.num_heads) for length in lengths]
        self.k = [normal(length, shape.num_kv_heads) for length in lengths]
        self.v = [normal(length, shape.num_kv_heads) for length in lengths]

    def attend(self, slices, seed: int = 0) -> list[torch.Tensor]:
        """Rows of one call. `slices` are (sequence, start, rows); all that precedes a slice is in the pool already."""
        num_blocks = 1 + sum(-(-(start + rows) // self.block_size) for _, start, rows in slices)
        blocks = Blocks(num_blocks, self.block_size, seed)
        kv = REFERENCE.new_kv(
            num_blocks,
            NUM_LAYERS,
            self.shape.num_kv_heads,
            self.block_size,
            self.shape.head_dim,
            self.dtype,
            self.device,
        ).fill_(float("nan"))
        items = []
        for sequence, start, rows in slices:
            table = blocks.take(start + rows)
            items.append(scheduled([0] * (start + rows), table, start, rows))
            for position in range(start + rows):
                block, offset = table[position // self.block_size], position % self.block_size
                kv[block, LAYER, 0, :, offset] = self.k[sequence][position]
                kv[block, LAYER, 1, :, offset] = self.v[sequence][position]
        step = input_of(batch_of(*items), self.block_size, self.device)
        q = torch.cat([self.q[sequence][start : start + rows] for sequence, start, rows in slices])
        out = REFERENCE.attention(q, self.shape, kv, LAYER, step)
        return list(out.split([rows for _, _, rows in slices]))

    def expected(self, sequence: int) -> torch.Tensor:
        """All rows of a sequence by the textbook, in float64: [T, Hq * D]."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        q = self.q[sequence].double()
        k = self.k[sequence].double().repeat_interleave(group, dim=1)
        v = self.v[sequence].double().repeat_interleave(group, dim=1)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        distance = distance.abs() if self.shape.bidirectional else distance
        visible = (distance >= 0) & (distance < (self.shape.window or len(q)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.shape.scale
        weights = textbook_weights(scores, visible.to(scores.device), self.shape)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@pytest.mark.parametrize("heads", [(7, 1), (4, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 50, 130])
def test_rows_that_see_both_ways_are_their_definition_and_keep_their_bits(heads, window):
    lengths = [1, 9, 300, 131, 64, 577]
    sequences = _Sequences(lengths, replace(_shape(*heads, 24, window), bidirectional=True))
    whole = [(sequence, 0, length) for sequence, length in enumerate(lengths)]
    together = sequences.attend(whole)
    for slice_, rows in zip(whole, together, strict=True):
        assert (rows.double() - sequences.expected(slice_[0])).abs().max() < TOLERANCE[torch.float32]
        (alone,) = sequences.attend([slice_], seed=1)
        assert torch.equal(rows, alone)
    ends = [(sequence, max(0, length - 11), min(11, length)) for sequence, length in enumerate(lengths)]
    for rows, found in zip(together, sequences.attend(ends), strict=True):
        assert torch.equal(rows[-len(found) :], found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "block_size"),
    [
        (4, 2, 32, None, 16),
        (4, 4, 16, None, 8),
        (7, 1, 64, None, 16),
        (6, 2, 24, 50, 16),
        (4, 2, 32, 1, 16),
        (4, 2, 32, 200, 48),
        (8, 1, 128, None, 256),
        (32, 1, 8, 129, 1),
    ],
)
def test_attention_computes_its_definition(*, heads, kv_heads, head_dim, window, block_size, dtype, device):
    lengths = [1, 9, 300, 131, 64]
    sequences = _Sequences(lengths, _shape(heads, kv_heads, head_dim, window), dtype, device, block_size=block_size)
    # A whole prompt, single rows, a slice behind a cached prefix.
    starts = [0, 8, 0, 130, 37]
    slices = [(i, start, lengths[i] - start) for i, start in enumerate(starts)]
    for (sequence, start, _), rows in zip(slices, sequences.attend(slices), strict=True):
        expected = sequences.expected(sequence)[start:]
        error = (rows.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[dtype], f"sequence {sequence}: {error}"


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("softcap", [None, 0.7, 50.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-3.0, 0.5, 4.0, 60.0])], ids=["no sinks", "sinks"])
def test_softcaps_and_sinks_are_their_definition_and_keep_a_rows_bits(window, softcap, sinks):
    shape = replace(_shape(window=window), softcap=softcap, sinks=sinks)
    lengths = [1, 9, 300, 131]
    sequences = _Sequences(lengths, shape)
    slices = [(0, 0, 1), (1, 8, 1), (2, 0, 300), (3, 100, 31)]
    for slice_, rows in zip(slices, sequences.attend(slices), strict=True):
        sequence, start, count = slice_
        expected = sequences.expected(sequence)[start:]
        assert (rows.double() - expected).abs().max() < 1e-5 * expected.abs().max()
        assert torch.equal(sequences.attend([slice_])[0], rows)
        assert torch.equal(sequences.attend([(sequence, start + count - 1, 1)], seed=3)[0], rows[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "block_size"),
    [(4, 2, None, 16), (4, 4, 40, 16), (3, 1, None, 48), (16, 1, 130, 256)],
)
def test_a_row_does_not_depend_on_the_slice_it_is_computed_in(heads, kv_heads, window, block_size, dtype):
    length = 280
    sequences = _Sequences([length], _shape(heads, kv_heads, 32, window), dtype, block_size=block_size)
    (whole,) = sequences.attend([(0, 0, length)])
    source = random.Random(heads)
    slices = [(start, 1) for start in (0, 1, 127, 128, 129, 255, 256, length - 1)]
    for rows in (2, 3, 7, 8, 9, 16, 31, 64, 150):
        slices += [(source.randrange(length - rows), rows), (length - rows, rows)]
    for start, rows in slices:
        (result,) = sequences.attend([(0, start, rows)], seed=start)
        assert torch.equal(result, whole[start : start + rows]), f"rows {start}..{start + rows}"


@pytest.mark.parametrize("window", [None, 33])
def test_a_row_does_not_depend_on_its_neighbours(window):
    """40 sequences of all lengths in one call, in two orders, against each alone."""
    source = random.Random(0)
    lengths = [source.choice((1, 5, 40, 128, 129, 200)) for _ in range(40)]
    sequences = _Sequences(lengths, _shape(window=window, head_dim=16), torch.bfloat16)
    slices = [(i, source.randrange(length), 0) for i, length in enumerate(lengths)]
    slices = [(i, start, source.randint(1, lengths[i] - start)) for i, start, _ in slices]
    alone = [sequences.attend([one])[0] for one in slices]
    for order in (slices, slices[::-1], slices[7:19]):
        for one, result in zip(order, sequences.attend(order, seed=5), strict=True):
            assert torch.equal(result, alone[slices.index(one)]), f"slice {one}"


def test_a_row_does_not_depend_on_a_neighbours_values():
    sequences = _Sequences([90, 70, 300], _shape())
    slices = [(0, 88, 2), (1, 0, 70), (2, 299, 1)]
    before = sequences.attend(slices)
    for other in (sequences.q, sequences.k, sequences.v):
        other[1].fill_(float("nan"))
    after = sequences.attend(slices)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert after[1].isnan().all()


def test_a_row_does_not_depend_on_the_number_of_threads():
    sequences = _Sequences([300] * 9, _shape(8, 2, 64), torch.bfloat16)
    slices = [(i, 299, 1) for i in range(8)] + [(8, 0, 300)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = torch.cat(sequences.attend(slices))
        torch.set_num_threads(3)
        three = torch.cat(sequences.attend(slices))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, three)


# Rotary embedding and the pool


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_norms_rotates_and_stores(normed, device):
    heads, kv_heads, width = 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    norm = (1 + torch.rand(2, width, generator=generator)).to(device) if normed else (None, None)
    shape = AttentionShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width, scale=1.0, q_norm=norm[0], k_norm=norm[1]
    )
    positions, slots = [5, 0, 30], [33, 2, 16]
    qkv = torch.randn(3, (heads + 2 * kv_heads) * width, generator=generator).to(device)
    angles = torch.rand(40, width // 2, generator=generator, dtype=torch.float64).to(device)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    kv = REFERENCE.new_kv(3, NUM_LAYERS, kv_heads, 16, width, torch.float32, torch.device(device))
    q = REFERENCE.rope_write(qkv, table, shape, kv, LAYER, step_at(slots, positions, torch.device(device)))

    x = qkv.double().view(3, -1, width)
    parts = {"q": x[:, :heads], "k": x[:, heads : heads + kv_heads]}
    for i, name in enumerate(parts):
        if normed:
            parts[name] = parts[name] / (parts[name].square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm[i].double()
        pairs = torch.complex(parts[name][..., : width // 2], parts[name][..., width // 2 :])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
        parts[name] = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(q.double(), parts["q"], rtol=1e-5, atol=1e-6)
    for row, slot in enumerate(slots):
        block, offset = divmod(slot, 16)
        written = kv[block, LAYER, :, :, offset]
        torch.testing.assert_close(written[0].double(), parts["k"][row], rtol=1e-5, atol=1e-6)
        assert torch.equal(written[1], qkv.view(3, -1, width)[row, heads + kv_heads :])
        written.zero_()
    assert not kv.any(), "something else was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_write_treats_every_row_alike(dtype):
    shape = AttentionShape(
        num_heads=3,
        num_kv_heads=1,
        head_dim=24,
        scale=1.0,
        q_norm=torch.rand(24).to(dtype),
        k_norm=torch.rand(24).to(dtype),
    )
    table = torch.randn(100, 24)
    qkv = torch.randn(70, 5 * 24).to(dtype)
    positions, slots = list(range(70)), list(range(70))

    def run(rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        kv = REFERENCE.new_kv(5, 1, 1, 16, 24, dtype, torch.device("cpu"))
        step = step_at([slots[r] for r in rows], [positions[r] for r in rows])
        return REFERENCE.rope_write(qkv[rows.start : rows.stop], table, shape, kv, 0, step), kv

    whole_q, whole_kv = run(range(70))
    for num_rows in range(1, 70):
        rows = range(70 - num_rows, 70)
        q, kv = run(rows)
        assert torch.equal(q, whole_q[rows.start :])
        last = divmod(69, 16)
        assert torch.equal(kv[last[0], 0, :, :, last[1]], whole_kv[last[0], 0, :, :, last[1]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_pool_is_zeroed_block_major_and_as_large_as_announced(dtype):
    kv = REFERENCE.new_kv(6, 3, 2, 16, 8, dtype, torch.device("cpu"))
    assert kv.shape[0] == 6
    assert not kv.any()
    assert kv[2].is_contiguous()
    assert kv[2].nbytes == REFERENCE.kv_block_bytes(3, 2, 16, 8, dtype)
