"""The benchmark of paged against contiguous attention does its work, at a tiny size."""

from __future__ import annotations

import re

import torch
from benchmarks.paged_attention import _row


def test_a_row_has_the_time_and_three_ratios() -> None:
    time, *ratios = _row(torch.device("cpu"), batch=2, context=32, repeat=1)
    assert int(time) > 0
    assert len(ratios) == 3
    assert all(re.fullmatch(r"\d+\.\d\dx \(\d+\.\d\d-\d+\.\d\d\)", ratio) for ratio in ratios), ratios
