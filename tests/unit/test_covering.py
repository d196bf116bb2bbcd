"""The rows that `make kernel-test` takes of a cross product have every pair of values, and are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from support.covering import covering


@pytest.mark.parametrize("sizes", [(5, 2, 3, 3), (5, 3, 6, 8), (2, 2, 2, 2, 2), (6, 1, 4), (7, 9)])
def test_each_pair_of_values_is_in_a_row(sizes: tuple[int, ...]) -> None:
    rows = list(product(*map(range, sizes)))
    kept = [rows[i] for i in covering(rows)]
    for i, j in combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in kept} == set(product(range(sizes[i]), range(sizes[j])))
    largest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert len(kept) <= 2 * largest
    assert kept == [rows[i] for i in covering(rows)], "the same each time"


def test_pairs_that_no_row_has_are_not_asked_for() -> None:
    rows = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1), (1, 1, 1)]
    assert covering(rows) == [0, 1, 2, 3]
    assert covering([]) == []
