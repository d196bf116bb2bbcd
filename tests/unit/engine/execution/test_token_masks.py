"""Masks on logits: what has no bit is -inf, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire_engine.execution.constrained import grammars
from quire_engine.execution.constrained.constraints import clear_bits, set_bits
from quire_engine.execution.constrained.grammars import MaskWriter
from quire_engine.execution.distribution import padded

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def mask_of(ids: set[int], vocab_size: int) -> np.ndarray:
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    set_bits(memoryview(mask.view(np.uint8)), tuple(ids))
    return mask


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("few_cells", [0, 1 << 30], ids=["row by row", "together"])
@pytest.mark.parametrize("vocab_size", [61, 2048, 5003, 31, 64])
def test_what_has_no_bit_is_gone(monkeypatch, vocab_size, few_cells, device):
    monkeypatch.setattr(grammars, "_FEW_CELLS", few_cells)
    dice = np.random.default_rng(vocab_size)
    few, half = (set(dice.choice(vocab_size, size).tolist()) for size in (3, vocab_size // 2))
    every = set(range(vocab_size))
    allowed = {1: few, 2: set(), 3: every, 5: half, 6: every - few}
    masks = {row: mask_of(ids, vocab_size) for row, ids in allowed.items()}
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(1)).to(device)
    wanted = padded(logits)
    for row, ids in allowed.items():
        wanted[row, sorted(every - ids)] = -torch.inf
    before = logits.clone()
    writer = MaskWriter()
    for _ in range(2):  # the second time from memory
        assert torch.equal(writer.masked(logits, masks), wanted)
    assert torch.equal(logits, before)
    in_place = padded(logits)
    MaskWriter().apply(in_place, masks)
    assert torch.equal(in_place, wanted)
    assert torch.equal(MaskWriter().masked(logits, {}), padded(logits))


def test_every_row_masked_is_no_other_thing():
    logits, masks = torch.zeros(2, 64), {0: mask_of({3}, 64), 1: mask_of({5, 63}, 64)}
    for masked in (MaskWriter().masked(logits, masks), logits):
        MaskWriter().apply(masked, masks)
        assert [row.nonzero().flatten().tolist() for row in (masked == 0)] == [[3], [5, 63]]


def test_masks_are_forgotten_in_turn(monkeypatch):
    monkeypatch.setattr(grammars, "_FEW_CELLS", 0)
    monkeypatch.setattr(grammars, "_MAX_KEPT", 3)
    writer = MaskWriter()
    for i in range(10):
        masked = writer.masked(torch.zeros(1, 64), {0: mask_of({i}, 64)})
        assert (masked[0] == 0).nonzero().flatten().tolist() == [i]
    assert len(writer._kept) == 3


def test_bits():
    mask = mask_of({0, 31, 32, 63}, 64)
    assert mask.tolist() == [-(2**31) + 1, -(2**31) + 1]
    clear_bits(memoryview(mask.view(np.uint8)), (0, 5, 63))
    assert mask.tolist() == [-(2**31), 1]
