"""The benchmark behind `make bench`: it runs, and measures steps in which every sequence decodes."""

from __future__ import annotations

from benchmarks.host_cost import PARTS, run


def test_every_part_of_every_step_is_timed() -> None:
    times = run(64, 20, 128)
    assert set(times) == {*PARTS, "sum", "model input"}
    assert all(len(values) == 20 and min(values) > 0 for values in times.values())
