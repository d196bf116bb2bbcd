"""What is seen of a load: nothing of a short one, a line every few seconds of a long one, a bar on a terminal."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from types import SimpleNamespace

import pytest

from quire_server.showing import loading
from quire_server.showing.loading import Lines, show, shown


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_say_how_far_it_is_and_how_long_it_will_take():
    clock, said = Clock(), []
    lines = Lines(said.append, clock)
    for clock.now in range(33):
        lines.update("packing weights" if clock.now > 2 else "preparing", int(clock.now) << 28, 40 << 28)
    assert said == [
        "loading the model, 10 s so far: packing weights, 2.50 GiB of 10.0 GiB (25 %), about 21 s left",
        "loading the model, 20 s so far: packing weights, 5.00 GiB of 10.0 GiB (50 %), about 17 s left",
        "loading the model, 30 s so far: packing weights, 7.50 GiB of 10.0 GiB (75 %), about 9 s left",
    ]


def test_a_phase_of_unknown_length_is_named():
    clock, said = Clock(), []
    lines = Lines(said.append, clock)
    clock.now = 10.0
    lines.update("loading libraries", 0, 0)
    assert said == ["loading the model, 10 s so far: loading libraries"]


def test_a_short_load_shows_nothing(caplog):
    async def body() -> None:
        loaded = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.05, loaded.set_result, None)
        await show(lambda: pytest.fail("looked at"), loaded, bar=False)

    asyncio.run(body())
    assert not caplog.records


def test_a_long_load_is_told_until_it_ends(caplog, monkeypatch):
    monkeypatch.setattr(loading, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(loading, "_SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(loading, "_LOOK_SECONDS", 0.01)

    async def body() -> None:
        loaded = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.2, loaded.set_result, None)
        await show(lambda: SimpleNamespace(phase="packing weights", done=1 << 20, total=1 << 21), loaded, bar=False)

    with caplog.at_level(logging.INFO, "quire.loading"):
        asyncio.run(asyncio.wait_for(body(), 300))
    assert len(caplog.records) > 1
    assert "packing weights, 1.00 MiB of 2.00 MiB (50 %)" in caplog.records[0].getMessage()


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with shown(bar=True) as update:
        update("packing weights", 3 << 20, 6 << 20)
    text = sys.stderr.getvalue()
    assert "packing weights" in text
    assert "3.1/6.3 MB" in text
