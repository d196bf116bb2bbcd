"""Runs tests of random schedules for longer: `pytest -p support.at_length --times 20 tests/property/...`.

Promises: state machines and tests of drawn values draw so many times their examples; tests that ask for the option do
so many times their runs. Every run draws other values, and so may find new faults.
Must not know: any test.
"""

from __future__ import annotations

import hypothesis
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=1, help="how many times the usual number of random runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    times: int = config.getoption("--times")
    for case in {item.cls for item in items if isinstance(item, pytest.Function) and item.cls is not None}:
        usual = getattr(case, "settings", None)
        if isinstance(usual, hypothesis.settings):
            case.settings = hypothesis.settings(usual, max_examples=usual.max_examples * times)
    for drawn in {item.function for item in items if isinstance(item, pytest.Function) and item.cls is None}:
        if hypothesis.is_hypothesis_test(drawn):
            usual = drawn._hypothesis_internal_use_settings  # where `settings` keeps it
            more = hypothesis.settings(usual, max_examples=usual.max_examples * times)
            drawn._hypothesis_internal_use_settings = more
