"""The supervisor against those who mean harm and against what stands still: crashes that count for nobody, hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time

import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import CrashLoop
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import EngineState, Supervisor
from support.supervising import FAKE, expected, reached, request, run, supervised


@pytest.mark.matrix  # quarantine without processes: test_quarantine.py
def test_a_client_cannot_use_up_the_restarts_of_the_server() -> None:
    """Each crashing request is another one, so that none is known before; a stream beside them goes on."""

    async def body() -> None:
        async with supervised("poison:666", max_restarts=1) as (supervisor, client):
            supervisor.submit(request("victim", (5,), tokens=900))
            await client.until(lambda: len(client.tokens) == 1)
            for number in range(2):
                name = f"bad{number}"
                supervisor.submit(request(name, (number, 666)))
                await client.until(lambda name=name: (name, 0) in client.ends)
                assert client.ends[name, 0].culprit
            await client.until(lambda: len(client.ends) == 3)
            assert supervisor.restarts == 4
            assert client.tokens["victim", 0] == expected((5,), 900)
            assert supervisor.state is EngineState.READY

    run(body)


def test_the_like_of_a_culprit_is_refused_and_what_waits_of_it_ends_with_it() -> None:
    async def body() -> None:
        async with supervised("poison:666") as (supervisor, client):
            for number in range(5):
                supervisor.submit(request(f"bad{number}", (1, 666)))
            await client.until(lambda: len(client.ends) == 5)
            assert all(end.culprit for end in client.ends.values())
            await reached(supervisor, EngineState.READY)
            assert supervisor.restarts == 2
            assert supervisor.quarantine.refusal(request("again", (1, 666)), time.monotonic()) is not None
            assert supervisor.quarantine.refusal(request("other", (2, 666)), time.monotonic()) is None

    run(body)


def test_an_engine_that_crashes_on_a_request_of_ours_is_given_up_and_nobody_is_blamed() -> None:
    async def body() -> None:
        async with supervised("poison:0", max_restarts=2) as (supervisor, client):
            supervisor.submit(request("bad", (0,)))
            await asyncio.wait_for(asyncio.shield(supervisor.dead), 300)
            assert not client.ends["bad", 0].culprit
            assert supervisor.state is EngineState.DEAD

    run(body)


def test_a_stopped_engine_is_replaced_and_its_stream_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with supervised(hang_seconds=3.2) as (supervisor, client):
            supervisor.submit(request("r", tokens=300))
            await client.until(lambda: bool(client.tokens))
            assert supervisor.stuck_seconds() == 0
            os.kill(supervisor.pid or 0, signal.SIGSTOP)
            while not supervisor.is_stuck:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert supervisor.stuck_seconds() > 2
            await client.until(lambda: bool(client.ends))
            assert client.tokens["r", 0] == expected((1, 2, 3), 300)
            assert supervisor.stuck_seconds() == 0

    with caplog.at_level(logging.ERROR):
        run(body)
    assert "is stopped by a signal" in caplog.text


@pytest.mark.matrix  # as one that is busy
def test_an_idle_engine_that_is_stopped_is_replaced_too() -> None:
    async def body() -> None:
        async with supervised(hang_seconds=2.0) as (supervisor, client):
            os.kill(supervisor.pid or 0, signal.SIGSTOP)
            async with asyncio.timeout(300):
                while supervisor.restarts == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            supervisor.submit(request("r", tokens=5))
            await client.until(lambda: bool(client.ends))
            assert client.tokens["r", 0] == expected((1, 2, 3), 5)

    run(body)


def test_a_start_that_hangs_is_ended_and_tried_again_until_it_was_too_often() -> None:
    async def body() -> None:
        policy = RestartPolicy(max_restarts=1, first_backoff_seconds=0.01, start_seconds=0.2)
        supervisor = Supervisor(EngineConfig(model="hang-at-start"), policy, program=FAKE)
        with pytest.raises(CrashLoop, match="while starting; the engine failed 2 times"):
            await supervisor.start()
        await supervisor.stop()

    run(body)


def test_a_start_that_gets_on_has_all_the_time_it_needs() -> None:
    """Eight silences in a row that together are longer than the limit; on a busy machine all of them are stretched."""

    async def start(seconds: float) -> None:
        policy = RestartPolicy(max_restarts=0, start_seconds=seconds)
        supervisor = Supervisor(EngineConfig(model=f"slow-start:{seconds / 5}"), policy, program=FAKE)
        try:
            await supervisor.start()
            assert supervisor.progress is not None
        finally:
            await supervisor.stop()

    async def body() -> None:
        for seconds in (0.6, 2.4, 9.6):
            with contextlib.suppress(CrashLoop):
                await start(seconds)
                return
        await start(40.0)

    run(body)


@pytest.mark.matrix  # as a start that hangs
def test_a_restart_that_hangs_is_tried_again() -> None:
    async def body() -> None:
        async with supervised(start_seconds=0.8) as (supervisor, client):
            supervisor.submit(request("r", tokens=200))
            await client.until(lambda: bool(client.tokens))
            working, supervisor._config = supervisor._config, EngineConfig(model="hang-at-start")
            os.kill(supervisor.pid or 0, signal.SIGSEGV)
            async with asyncio.timeout(300):
                while supervisor.restarts < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            supervisor._config = working
            await client.until(lambda: bool(client.ends))
            assert client.tokens["r", 0] == expected((1, 2, 3), 200)

    run(body)
