"""Of the rows of a test's cross product, few that have every pair of values: what most faults of two causes need.

Promises: the same rows for the same product; each value of each parameter is in one of them, and so is each pair of
values that any row has. Must not know: any test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

Row = tuple[int, ...]


def covering(rows: Sequence[Row]) -> list[int]:
    """Which of the rows to keep, in their order; a row has an index of a value for each parameter."""
    pairs = [set(enumerate_pairs(row)) for row in rows]
    open_pairs = set().union(*pairs) if pairs else set()
    kept: list[int] = []
    left = set(range(len(rows)))
    while open_pairs:
        best = max(sorted(left), key=lambda i: len(pairs[i] & open_pairs))
        kept.append(best)
        left.discard(best)
        open_pairs -= pairs[best]
    return sorted(kept)


def enumerate_pairs(row: Row) -> Iterable[tuple[int, int, int, int]]:
    """Each two parameters with their values."""
    return ((i, a, j, b) for (i, a), (j, b) in combinations(enumerate(row), 2))


def few(values: Iterable[object], *kept: object) -> list[object]:
    """Return the values as parameters, of which all but those kept are left to longer runs."""
    rows = ((value, value if isinstance(value, tuple) else (value,)) for value in values)
    return [value if value in kept else pytest.param(*row, marks=pytest.mark.matrix) for value, row in rows]


def mark_all_others(items: Iterable[pytest.Item], mark: str, *, more_than: int) -> None:
    """Mark the rows of each test with more than two parameters, and more than so many rows, that may be left out."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in tests.values():
        axes = _axes(rows)
        if len(rows) <= more_than or len(axes) < 3:
            continue
        kept = set(covering(list(zip(*axes, strict=True))))
        for i, item in enumerate(rows):
            if i not in kept:
                item.add_marker(mark)


def _axes(rows: Sequence[pytest.Function]) -> list[tuple[int, ...]]:
    """The parameters that differ between the rows, as the index of each row's value; those given together are one.

    Every row has the very objects that the parameters were given as.
    """
    columns = set()
    for name in {name for item in rows for name in item.callspec.params}:
        values = [id(item.callspec.params.get(name)) for item in rows]
        index = {value: i for i, value in enumerate(dict.fromkeys(values))}
        columns.add(tuple(index[value] for value in values))
    return sorted(column for column in columns if len(set(column)) > 1)
