"""Prefill attention: its definition in a pool of NaN, in mixed steps too, and independence of chunks and neighbours."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from quire_kernels.triton.attention import TritonAttention
from support.covering import few
from support.triton_attention import DEVICE, LAYER, Sequences, shape_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "page"),
    [
        (4, 2, 32, None, 16),
        (3, 1, 80, None, 16),
        (16, 1, 64, 100, 48),
        (1, 1, 96, 1, 16),
        (2, 1, 256, None, 64),
        (8, 1, 512, None, 32),
    ],
)
def test_prefill_computes_its_definition(*, heads, kv_heads, head_dim, window, page, dtype):
    sequences = Sequences([150, 90, 2, 300, 7], shape_of(heads, kv_heads, head_dim, window), dtype, page=page)
    # A whole prompt, a decode row, two rows, chunks behind a cached prefix.
    sequences.check([(0, 0, 150), (1, 89, 1), (2, 0, 2), (3, 230, 70), (4, 4, 3)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_prefill_from_an_fp8_pool(dtype, deterministic):
    sequences = Sequences([70, 300], shape_of(3, 1, 48, 100), dtype)
    sequences.check([(0, 0, 70), (1, 280, 20)], fp8=True, deterministic=deterministic)


def test_masks_where_all_keys_are_seen_change_no_bit():
    sequences = Sequences([300], shape_of(4, 2, 32, None))
    plain = TritonAttention(clears=False)
    assert torch.equal(*(sequences.attend([(0, 20, 280)], ops=ops)[0] for ops in (plain, TritonAttention())))


@pytest.mark.parametrize(
    ("window", "softcap"), few(product([None, 100], [None, 0.7, 50.0]), (None, 50.0), (100, 0.7), (100, None))
)
def test_softcaps_and_sinks(window, softcap):
    """With decode rows of one part and of several; deterministic: the same bits in chunks."""
    sinks = torch.tensor([-3.0, 0.5, 4.0, 60.0], device=DEVICE)
    sequences = Sequences([150, 90, 700], replace(shape_of(window=window), softcap=softcap, sinks=sinks))
    slices = [(0, 0, 150), (1, 89, 1), (2, 699, 1)]
    sequences.check(slices)
    (whole,) = sequences.attend([(2, 0, 700)], deterministic=True)
    sequences.check([(2, 640, 60)], deterministic=True)
    for start, rows in ((600, 100), (699, 1)):
        (chunk,) = sequences.attend([(2, start, rows)], deterministic=True, seed=start)
        assert torch.equal(chunk, whole[start : start + rows])


def test_many_sequences_find_their_tiles():
    """More sequences than one look at the row offsets covers; all but the first and the last are without rows."""
    sequences = Sequences([20, 30], shape_of(2, 1, 32))
    kv, step = sequences.pool([(0, 0, 20), (1, 3, 27)])
    q = torch.cat([sequences.q[0], sequences.q[1][3:]])
    few = TritonAttention().attention(q, sequences.shape, kv, LAYER, step)
    between = 130

    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1], x.new_zeros(between, *x.shape[1:]), x[1:]])

    many = replace(
        step,
        query_starts=torch.tensor([0, *[20] * (between + 1), 47], dtype=torch.int32, device=DEVICE),
        context_lens=spread(step.context_lens),
        block_tables=spread(step.block_tables),
        query_lens=(20, *[0] * between, 27),
        kv_lens=(20, *[0] * between, 30),
    )
    assert torch.equal(TritonAttention().attention(q, sequences.shape, kv, LAYER, many), few)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 70])
def test_chunks_are_the_whole_bit_for_bit(window, deterministic):
    """Of two rows at least where only prefill is compared with itself; else also of one row, which is decode's."""
    sequences = Sequences([600, 40], shape_of(3, 1, 32, window))
    (whole,) = sequences.attend([(0, 0, 600)], deterministic=deterministic)
    for start, rows in ((0, 33), (250, 90), (598, 2), (255, 1), (599, 1), (40, 1)):
        if rows > 1 or deterministic:
            chunk, _ = sequences.attend([(0, start, rows), (1, 30, 10)], deterministic=deterministic, seed=start)
            assert torch.equal(chunk, whole[start : start + rows]), (start, rows)


def test_order_of_sequences_does_not_matter():
    sequences = Sequences([70, 40, 300], shape_of(4, 2, 64))
    slices = [(0, 0, 70), (1, 39, 1), (2, 280, 20)]
    forward = sequences.attend(slices)
    backward = sequences.attend(slices[::-1], seed=1)
    assert all(torch.equal(a, b) for a, b in zip(forward, backward[::-1], strict=True))
