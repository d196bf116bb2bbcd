"""How an engine begins and ends under the supervisor: failed starts, stops, crash loops that are given up."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress

import psutil
import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, CrashLoop, EngineDead, ModelLoadError
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import EngineState, Supervisor
from support.supervising import FAKE, request, run, send_garbage, supervised


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ("fail-config", ConfigError, "--kv-memory"),
        ("fail-model", ModelLoadError, "model.safetensors"),
        ("exit-at-start", CrashLoop, "exited with code 3 while starting; the engine failed 2 times in 600 s"),
    ],
)
def test_a_failed_start_says_why(model: str, error: type[Exception], text: str) -> None:
    async def body() -> None:
        policy = RestartPolicy(max_restarts=1, first_backoff_seconds=0.01)
        supervisor = Supervisor(EngineConfig(model=model), policy, program=FAKE)
        with pytest.raises(error, match=text):
            await supervisor.start()
        await supervisor.stop()

    run(body)


def test_a_program_that_cannot_be_launched_is_one_clear_line() -> None:
    async def body() -> None:
        with pytest.raises(EngineDead, match="/no/such/program"):
            await Supervisor(EngineConfig(model="ok"), program=("/no/such/program",)).start()

    run(body)


def test_an_engines_last_words_go_where_they_are_wanted() -> None:
    """Not to the server's own stderr, which nobody may read any more."""

    async def body() -> None:
        reader, writer = os.pipe()
        policy = RestartPolicy(max_restarts=0)
        program = (sys.executable, "-c", "import sys; sys.exit('its last words')")
        with pytest.raises(EngineDead, match="exited with code 1"):
            await Supervisor(EngineConfig(model="ok"), policy, program=program, stderr=writer).start()
        os.close(writer)
        assert set(os.read(reader, 1000).splitlines()) == {b"its last words"}
        os.close(reader)

    run(body)


def test_stop_during_the_start_leaves_nothing_running() -> None:
    async def body() -> None:
        supervisor = Supervisor(EngineConfig(model="ok"), program=FAKE)
        starting = asyncio.create_task(supervisor.start())
        await asyncio.sleep(0)
        child = psutil.Process(supervisor.pid)
        await supervisor.stop()
        with pytest.raises(EngineDead):
            await starting
        assert supervisor.state is EngineState.STOPPED
        assert not child.is_running()
        assert supervisor.pid is None

    run(body)


def test_stop_leaves_no_process_and_answers_what_is_live() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            child = psutil.Process(supervisor.pid)
            supervisor.submit(request("r", tokens=1000))
            await client.until(lambda: bool(client.tokens))
            await supervisor.stop()
            assert not child.is_running()
            assert client.ends["r", 0].finish == "error"
            await supervisor.stop()

    run(body)


def test_stop_leaves_no_process_that_was_about_to_be_replaced() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, _):
            child = psutil.Process(supervisor.pid)
            child.suspend()
            send_garbage(supervisor)
            await asyncio.sleep(0.05)
            try:
                await supervisor.stop()
                assert not child.is_running()
            finally:
                with suppress(psutil.NoSuchProcess):
                    child.kill()

    run(body)


def test_the_child_dies_with_its_parent() -> None:
    """The real engine process, before its START frame: an orphan must not stay."""
    ours, theirs = socket.socketpair()
    pid = os.spawnv(
        os.P_NOWAIT, sys.executable, [sys.executable, "-m", "quire_engine.process", str(theirs.fileno()), "1"]
    )
    assert os.waitpid(pid, 0)[1] != 0
    ours.close()
    theirs.close()


def test_a_crash_loop_gives_up_and_fails_what_is_live() -> None:
    async def body() -> None:
        async with supervised(max_restarts=2) as (supervisor, client):
            supervisor._program = (sys.executable, "-c", "raise SystemExit(9)")
            supervisor.submit(request("r", tokens=1000))
            await client.until(lambda: bool(client.tokens))
            os.kill(supervisor.pid or 0, signal.SIGSEGV)
            await supervisor.dead
            assert supervisor.state is EngineState.DEAD
            assert client.ends["r", 0].finish == "error"
            supervisor.submit(request("after"))
            assert client.ends["after", 0].finish == "error"

    run(body)


def test_a_changed_checkpoint_is_not_resumed_on() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            supervisor._checkpoint = "as it was at the start"
            supervisor.submit(request("r", tokens=1000))
            await client.until(lambda: bool(client.tokens))
            os.kill(supervisor.pid or 0, signal.SIGKILL)
            await supervisor.dead
            assert client.ends["r", 0].finish == "error"

    run(body)


def test_an_engine_that_had_to_be_killed_counts_as_failed() -> None:
    """Its SIGKILL is ours: not the operator's, which would be excused."""

    async def body() -> None:
        async with supervised(max_restarts=0) as (supervisor, client):
            supervisor.submit(request("r", tokens=1000))
            await client.until(lambda: bool(client.tokens))
            os.kill(supervisor.pid or 0, signal.SIGSTOP)
            send_garbage(supervisor)
            await asyncio.wait_for(asyncio.shield(supervisor.dead), 300)

    run(body)


def test_an_engine_that_cannot_even_be_started_again_is_given_up() -> None:
    async def body() -> None:
        async with supervised(max_restarts=2) as (supervisor, client):
            supervisor._program = ("/no/such/program",)
            supervisor.submit(request("r", tokens=1000))
            os.kill(supervisor.pid or 0, signal.SIGSEGV)
            await asyncio.wait_for(asyncio.shield(supervisor.dead), 300)
            assert client.ends["r", 0].finish == "error"

    run(body)


def test_supervision_that_fails_gives_up_instead_of_ending_silently() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):

            def on_restart() -> None:
                raise RuntimeError("no such counter")

            supervisor.on_restart = on_restart
            supervisor.submit(request("r", tokens=1000))
            await client.until(lambda: bool(client.tokens))
            os.kill(supervisor.pid or 0, signal.SIGKILL)
            await asyncio.wait_for(asyncio.shield(supervisor.dead), 300)
            assert client.ends["r", 0].finish == "error"

    run(body)
