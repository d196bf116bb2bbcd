"""A background task that fails begins anew, says so in the log, and ends when its work or its owner says so."""

from __future__ import annotations

import asyncio

import pytest

from quire_server import background

pytestmark = pytest.mark.anyio


async def test_work_that_raises_begins_anew_until_it_returns(monkeypatch, caplog) -> None:
    monkeypatch.setattr(background, "PAUSE_SECONDS", 0.0)
    rounds: list[int] = []

    async def work() -> None:
        rounds.append(len(rounds))
        if len(rounds) < 3:
            raise RuntimeError("planted")

    await background.begin(work, "planted-work")
    assert rounds == [0, 1, 2]
    assert [record.message for record in caplog.records] == [
        "the task planted-work has failed; it begins anew in 0 s"
    ] * 2


async def test_its_owner_ends_it() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    task = background.begin(wait, "waits")
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
