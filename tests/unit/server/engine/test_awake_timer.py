"""A timer of a process that is paused meanwhile, on a clock and a loop of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from quire_server.engine.awake_timer import AwakeTimer


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ((1.0, 1.0, 1.0, 1.0, 1.0), 1),
        ((1.0, 1.0, 1.0, 1.0), 0),
        ((1.0, 600.0, 1.0, 1.0), 0),
        ((1.0, 600.0, 1.0, 1.0, 1.0, 1.0), 1),
    ],
)
def test_pauses_of_the_process_do_not_count(
    monkeypatch: pytest.MonkeyPatch, steps: tuple[float, ...], calls: int
) -> None:
    now, called = 100.0, list[float]()
    looks: list[Callable[[], None]] = []
    loop = SimpleNamespace(call_later=lambda _, look: looks.append(look))
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    AwakeTimer(5.0, lambda: called.append(now), clock=lambda: now)
    for step in steps:
        now += step
        looks.pop()()
    assert (len(called), len(looks)) == (calls, 1 - calls)
