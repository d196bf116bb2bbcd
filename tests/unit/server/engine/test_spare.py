"""The process that waits to be the next engine: taken over by the first restart, replaced, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from quire_server.engine import supervisor as supervisor_module
from quire_server.engine.process import EngineProcess
from quire_server.engine.supervisor import EngineState, Spare, Supervisor
from support.forking import Forked
from support.processes import lives
from support.supervising import FAKE, expected, reached, request, run, supervised


def waiting(supervisor: Supervisor) -> psutil.Process | None:
    """The child that is not the engine."""
    others = [child for child in engines() if child.pid != supervisor.pid]
    assert len(others) <= 1
    return others[0] if others else None


def engines() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid in Forked.pids and lives(child.pid)]


async def appeared(supervisor: Supervisor, *, but: int = 0) -> psutil.Process:
    async with asyncio.timeout(300):
        while (process := waiting(supervisor)) is None or process.pid == but:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return process


async def killed(supervisor: Supervisor, restarts: int) -> None:
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    async with asyncio.timeout(300):
        while supervisor.restarts < restarts:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await reached(supervisor, EngineState.READY)


def test_it_is_the_next_engine_and_another_waits_then() -> None:
    async def body() -> None:
        async with supervised(spare_seconds=0.02) as (supervisor, client):
            supervisor.submit(request("a", (5,), tokens=60))
            spare = await appeared(supervisor)
            await client.until(lambda: len(client.tokens) == 1)
            await killed(supervisor, 1)
            assert supervisor.pid == spare.pid
            await client.until(lambda: ("a", 0) in client.ends)
            alone = client.tokens["a", 0]
            supervisor.submit(request("b", (5,), tokens=60))
            another = await appeared(supervisor, but=spare.pid)
            await client.until(lambda: ("b", 0) in client.ends)
            assert client.tokens["b", 0] == alone
        assert not spare.is_running()
        assert not another.is_running()

    run(body)


def test_one_that_has_ended_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with supervised(spare_seconds=0.02) as (supervisor, _):
            spare = await appeared(supervisor)
            spare.kill()
            async with asyncio.timeout(300):
                while spare.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            await killed(supervisor, 1)
            assert supervisor.pid != spare.pid
            assert "the process that waited to be the next engine was ended by SIGKILL" in caplog.text
            await appeared(supervisor)

    run(body)


def test_one_that_has_ended_is_replaced_ever_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_LOOK_SECONDS", 0.01)

    async def body() -> None:
        async with supervised(spare_seconds=0.05) as (supervisor, _):
            spare, waits = await appeared(supervisor), []
            for _ in range(3):
                began = time.monotonic()
                spare.kill()
                spare = await appeared(supervisor, but=spare.pid)
                waits.append(time.monotonic() - began)
            assert waits[1] >= 0.1
            assert waits[2] >= 0.2
            assert caplog.text.count("the process that waited to be the next engine was ended by SIGKILL") >= 3
            await killed(supervisor, 1)
            assert supervisor.pid == spare.pid

    run(body)


def test_without_it_every_start_is_a_launch() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, _):
            await asyncio.sleep(0.05)
            assert waiting(supervisor) is None
            await killed(supervisor, 1)

    run(body)


def test_none_is_made_after_the_end() -> None:
    async def body() -> None:
        made: list[int] = []
        spare = Spare(lambda: made.append(1), 0.01)  # type: ignore[arg-type, return-value]
        spare.prepare()
        await spare.close()
        await asyncio.sleep(0.03)
        assert not made
        assert spare.take() is None

    run(body)


def test_one_is_shared_by_several_supervisors() -> None:
    async def body() -> None:
        spare = Spare(lambda: EngineProcess(FAKE, lambda _: None), 0.02)
        async with supervised(spare=spare) as (first, one), supervised(spare=spare) as (second, other):
            first.submit(request("a", (5,), tokens=60))
            second.submit(request("b", (6,), tokens=60))
            waits = await appeared_beside(first, second)
            await killed(second, 1)
            assert second.pid == waits.pid
            await appeared_beside(first, second)
            await one.until(lambda: ("a", 0) in one.ends)
            await other.until(lambda: ("b", 0) in other.ends)
            assert other.tokens["b", 0] == expected((6,), 60), "its outputs reach whom it serves"
            assert ("b", 0) not in one.tokens

    run(body)


async def appeared_beside(*supervisors: Supervisor) -> psutil.Process:
    async with asyncio.timeout(300):
        while True:
            others = [child for child in engines() if child.pid not in {each.pid for each in supervisors}]
            if others:
                return others[0]
            await asyncio.sleep(0.005)
