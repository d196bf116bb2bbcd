"""Decode attention: its definition over odd shapes, in a pool of NaN, and independence of the rest of the step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire_kernels.triton import decode_attention
from quire_kernels.triton.attention import TritonAttention
from support.triton_attention import DEVICE, LAYER, Sequences, shape_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "page"),
    [
        (4, 2, 32, None, 16),
        (3, 1, 80, None, 16),
        (16, 1, 128, None, 32),
        (2, 2, 96, 40, 16),
        (2, 1, 64, 300, 64),
        (2, 1, 256, 64, 48),
        (8, 1, 512, None, 32),
    ],
)
def test_decode_computes_its_definition(*, heads, kv_heads, head_dim, window, page, dtype):
    lengths = [1, 63, 256, 257, 530]
    sequences = Sequences(lengths, shape_of(heads, kv_heads, head_dim, window), dtype, page=page)
    sequences.check([(i, length - 1, 1) for i, length in enumerate(lengths)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "page"), [(3, 1, 48, None, 4), (4, 2, 128, 90, 16)]
)
def test_decode_from_an_fp8_pool(*, heads, kv_heads, head_dim, window, page, dtype):
    lengths = [1, 65, 530]
    sequences = Sequences(lengths, shape_of(heads, kv_heads, head_dim, window), dtype, page=page)
    sequences.check([(i, length - 1, 1) for i, length in enumerate(lengths)], fp8=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_is_the_same_alone_and_in_any_step(deterministic):
    """Bit for bit: other sequences, their number and order, prefill rows beside it, other blocks, longer tables."""
    sequences = Sequences([300, 257, 40, 700], shape_of(4, 2, 32))
    alone = [
        sequences.attend([(i, n - 1, 1)], deterministic=deterministic)[0] for i, n in ((0, 300), (1, 257), (2, 40))
    ]
    slices = [(3, 690, 10), (2, 39, 1), (3, 699, 1), (0, 299, 1), (1, 256, 1)]
    _, third, _, first, second = sequences.attend(slices, deterministic=deterministic, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(alone, (first, second, third), strict=True))


def test_sequences_beyond_the_scratch_take_further_launches(monkeypatch):
    shape = shape_of(2, 1, 32)
    sequences = Sequences([300, 20, 600, 260], shape)
    slices = [(i, len(q) - 1, 1) for i, q in enumerate(sequences.q)]
    together = sequences.attend(slices)
    # Room for the three parts of two sequences.
    monkeypatch.setattr(decode_attention, "SCRATCH_BYTES", 2 * 3 * 4 * shape.num_heads * shape.head_dim)
    assert all(torch.equal(a, b) for a, b in zip(together, sequences.attend(slices), strict=True))


@pytest.mark.parametrize("room", [1 << 20, 2 * 3 * 4 * 2 * 32, 1])
@pytest.mark.parametrize("window", [None, 300])
def test_the_memory_plan_knows_the_scratch(room, window, monkeypatch):
    """All at once, two sequences at a time, one at a time."""
    shape = shape_of(2, 1, 32, window)
    sequences = Sequences([300, 20, 600, 260], shape)
    kv, step = sequences.pool([(i, len(q) - 1, 1) for i, q in enumerate(sequences.q)])
    q = torch.cat([each[-1:] for each in sequences.q])
    monkeypatch.setattr(decode_attention, "SCRATCH_BYTES", room)
    taken, empty = [], torch.empty

    def noted(*sizes, **options):
        made = empty(*sizes, **options)
        taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", noted)
    TritonAttention().attention(q, shape, kv, LAYER, step)
    planned = decode_attention.decode_scratch(len(q), 600, shape.num_heads, shape.head_dim)
    assert sum(taken) <= planned
    assert window or sum(taken) == planned


def test_a_step_may_hold_sequences_without_rows():
    """As in the last layer, when only some sequences are sampled."""
    sequences = Sequences([30, 40, 50], shape_of(2, 1, 32))
    kv, step = sequences.pool([(0, 29, 1), (1, 30, 10), (2, 49, 1)])
    ops = TritonAttention()
    q = torch.cat([sequences.q[0][29:], sequences.q[1][30:], sequences.q[2][49:]])
    whole = ops.attention(q, sequences.shape, kv, LAYER, step)
    some = replace(
        step,
        positions=step.positions[-1:],
        query_starts=torch.tensor([0, 0, 0, 1], dtype=torch.int32, device=DEVICE),
        query_lens=(0, 0, 1),
        max_query_len=1,
    )
    assert torch.equal(ops.attention(q[-1:], sequences.shape, kv, LAYER, some), whole[-1:])
