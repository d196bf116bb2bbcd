"""Requests on their way to a full queue: counted until they are there, but not for longer than a second."""

from __future__ import annotations

from quire_server.http.overload import Underway


def test_those_are_counted_that_have_not_arrived() -> None:
    now = 0.0
    underway = Underway(lambda: now)
    ends = [underway.begin() for _ in range(3)]
    ends[1]()
    ends[1]()
    assert len(underway) == 2
    now = 0.9
    ends.append(underway.begin())
    assert len(underway) == 3
    now = 1.1  # whoever sends slowly
    assert len(underway) == 1
    ends[0]()
    ends[3]()
    assert len(underway) == 0
