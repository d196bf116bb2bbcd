"""The sizes of a step after which more tokens cost more, from the rising table of a cost model."""

from __future__ import annotations

import pytest
from benchmarks.step_curve import FETCHES, curve

from quire_engine.cost_model import knees


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ([(1, 10.0), (16, 10.2), (17, 15.0), (32, 15.2), (33, 20.0), (48, 20.1)], (16, 32)),  # the ends of tiles
        ([(1, 10.0), (64, 10.0), (128, 20.0), (256, 40.0), (512, 80.0)], (64,)),  # weights, then products
        ([(rows, 1.0 * rows) for rows in (1, 2, 4, 8)], ()),  # a line
        ([(1, 10.0), (2, 10.0), (3, 10.4), (4, 10.8)], ()),  # scatter
        ([(1, 10.0), (2, 20.0)], ()),
        ([], ()),
    ],
)
def test_a_knee_is_where_more_tokens_begin_to_cost_more(table: list[tuple[int, float]], found: tuple[int, ...]) -> None:
    assert knees(table) == found


def test_a_curve_has_the_medians_of_one_way_of_fetching_and_never_falls() -> None:
    times = {(1, FETCHES[0]): [3.0, 1.0, 2.0], (1, FETCHES[1]): [9.0], (8, FETCHES[0]): [1.5], (16, FETCHES[0]): [4.0]}
    assert curve(times, FETCHES[0]) == [(1, 1.5), (8, 1.5), (16, 4.0)]
