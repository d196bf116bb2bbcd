"""Masks on logits: what has no bit is -inf, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire_engine.execution.constrained import token_masks
from quire_engine.execution.constrained.follower import clear_bits, set_bits
from quire_engine.execution.constrained.token_masks import MaskWriter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def mask_of(ids: set[int], vocab_size: int) -> np.ndarray:
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    set_bits(mask, tuple(ids))
    return mask


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("few_cells", [0, 1 << 30], ids=["row by row", "by table"])
@pytest.mark.parametrize(("vocab_size", "width"), [(61, 64), (2048, 2048), (5003, 5056), (31, 64)])
def test_what_has_no_bit_is_gone(monkeypatch, vocab_size, width, few_cells, device):
    monkeypatch.setattr(token_masks, "_FEW_CELLS", few_cells)
    dice = np.random.default_rng(vocab_size)
    few, half = (set(dice.choice(vocab_size, size).tolist()) for size in (3, vocab_size // 2))
    masks = {1: few, 2: set(), 3: set(range(vocab_size)), 5: half, 6: set(range(vocab_size)) - few}
    logits = torch.randn(8, width, generator=torch.Generator().manual_seed(1)).to(device)
    before, writer = logits.clone(), MaskWriter()
    for _ in range(2):  # the second time from memory
        writer.apply(logits, {row: mask_of(ids, vocab_size) for row, ids in masks.items()})
    for row in range(8):
        allowed = masks.get(row, set(range(width)))
        for column in range(vocab_size):
            kept = before[row, column].item() if column in allowed else -torch.inf
            assert logits[row, column].item() == kept, (row, column)


def test_every_row_masked_is_no_other_thing():
    logits = torch.zeros(2, 64)
    MaskWriter().apply(logits, {0: mask_of({3}, 64), 1: mask_of({5, 63}, 64)})
    assert [row.nonzero().flatten().tolist() for row in (logits == 0)] == [[3], [5, 63]]


def test_masks_are_forgotten_in_turn(monkeypatch):
    monkeypatch.setattr(token_masks, "_FEW_CELLS", 0)
    monkeypatch.setattr(token_masks, "_MAX_KEPT", 3)
    writer = MaskWriter()
    for i in range(10):
        logits = torch.zeros(1, 64)
        writer.apply(logits, {0: mask_of({i}, 64)})
        assert logits[0].nonzero().numel() == 63
    assert len(writer._kept) == 3


def test_bits():
    mask = mask_of({0, 31, 32, 63}, 64)
    assert mask.tolist() == [-(2**31) + 1, -(2**31) + 1]
    clear_bits(mask, (0, 5, 63))
    assert mask.tolist() == [-(2**31), 1]
