"""What is part of `make kernel-test`: matrices of instruction sets, simulators. The rest is `make test`.

Of a test with many rows, rows that have every pair of values are part of it; `make kernel-matrix` takes all.
Promises: a new file here is part of `make kernel-test` until it is named below; the longest test begins first.
Must not know: what the tests are about.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.covering import mark_all_others

FOLDER = Path(__file__).parent
# Choices, contracts and messages: what an edit elsewhere may break, in seconds.
QUICK = {
    "test_choice.py",
    "test_flash_selected.py",
    "test_flash_signatures.py",
    "test_probe.py",
    "test_select.py",
}
LONGEST = "test_interpreted"
FEW = 12  # rows of a test that are all taken


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave unread what `make test` would read and select nothing of."""
    is_test = collection_path.name.startswith("test_") and collection_path.is_relative_to(FOLDER)
    selected = config.getoption("markexpr")
    return True if is_test and collection_path.name not in QUICK and selected.startswith("not kernels") else None


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER) and item.path.name not in QUICK:
            item.add_marker("kernels")
    mark_all_others([item for item in items if item.get_closest_marker("kernels")], "matrix", more_than=FEW)
    items.sort(key=lambda item: item.name != LONGEST)  # a stable sort: all others stay where they are
