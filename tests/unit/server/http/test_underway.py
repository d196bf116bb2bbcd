"""Requests on their way to a full queue: which of them count, and for how long."""

from __future__ import annotations

from quire_server.http.overload import Underway


def test_those_are_counted_that_have_not_arrived() -> None:
    now = 0.0
    underway = Underway(lambda: now)
    first, second, _slow = (underway.begin() for _ in range(3))
    underway.end(second)
    underway.end(second)
    assert underway.counts() == (0, 2)
    now = 0.9
    late = underway.begin()
    assert underway.counts() == (0, 3)
    now = 1.1  # whoever sends slowly
    assert underway.counts() == (0, 1)
    underway.end(first)
    underway.end(late)
    assert underway.counts() == (0, 0)


def test_what_has_come_counts_for_as_long_as_it_is_worked_on() -> None:
    now = 0.0
    underway = Underway(lambda: now)
    number, slow = underway.begin(), underway.begin()
    underway.has_come(number)
    assert underway.counts() == (1, 2)
    now = 60.0
    assert underway.counts() == (0, 1)
    underway.has_come(number)  # the client's leaving is looked for with the same call
    underway.has_come(slow)
    assert underway.counts() == (1, 2)
    underway.end(number)
    underway.end(slow)
    assert underway.counts() == (0, 0)
