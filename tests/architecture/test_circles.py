"""No import circle in any package, and none between folders: both read from the source and the folders alone.

Every folder is looked at as its direct entries, files and sub-folders, with an arrow where something in one imports
something in the other, later and for types only included. Where these arrows make no circle the folders have an order,
and nothing points from a lower one to a higher one.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest

from architecture.source import PACKAGES, entries, is_folder, modules


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """One circle of arrows, or nothing."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


FOLDERS = sorted({*PACKAGES, *(name for name in modules() if is_folder(name))})


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_points_back_up(folder: str):
    assert not circle(entries(folder))


def test_a_circle_would_be_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    arrows = entries("quire_engine")
    assert "scheduling" in arrows["engine"]
    arrows["scheduling"].add("engine")
    assert circle(arrows)
