"""The benchmark behind `make bench`: it runs, and measures steps in which every sequence decodes."""

from __future__ import annotations

import pytest
from benchmarks.host_cost import PARTS, run

from support.covering import few


@pytest.mark.parametrize(
    ("sequences", "steps"), few([(16, 5), (64, 20), (256, 2)], (16, 5))
)  # where prompts take many steps to be in, too
def test_every_part_of_every_step_is_timed(sequences: int, steps: int) -> None:
    times = run(sequences, steps, 128)
    assert set(times) == {*PARTS, "sum", "model input", "garbage"}
    assert all(len(values) == steps and min(values) > 0 for values in times.values())
