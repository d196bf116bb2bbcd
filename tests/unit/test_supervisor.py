"""The supervisor over a real child process with invented tokens: crashes, hangs, culprits, crash loops, shutdown."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from quire_engine.config import EngineConfig
from quire_engine.errors import ConfigError, EngineDead, ModelLoadError
from quire_engine.types import GenerationRequest, SamplingParams, StepOutput, StopParams, TokenOutput
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import EngineState, Supervisor
from support.fake_engine_process import next_token

FAKE = (sys.executable, str(Path(__file__).resolve().parents[1] / "support/fake_engine_process.py"))


class Client:
    """Collects outputs per (request, choice)."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], TokenOutput] = {}
        self._changed = asyncio.Event()

    def on_step(self, step: StepOutput) -> None:
        for output in step.outputs:
            key = (output.request_id, output.choice)
            assert key not in self.ends, f"{key} got an output after its last"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish is not None:
                self.ends[key] = output
        self._changed.set()

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def request(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), tokens: int = 40, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=tokens),
        n=n,
    )


def expected(prompt: tuple[int, ...], tokens: int, choice: int = 0) -> list[int]:
    known = list(prompt)
    for _ in range(tokens):
        known.append(next_token(known, choice))
    return known[len(prompt) :]


@asynccontextmanager
async def supervised(model: str = "ok", **policy: float) -> AsyncIterator[tuple[Supervisor, Client]]:
    settings = {"first_backoff_seconds": 0.01, **policy}
    supervisor = Supervisor(EngineConfig(model=model), RestartPolicy(**settings), program=FAKE)  # type: ignore[arg-type]
    client = Client()
    supervisor.on_step = client.on_step
    await supervisor.start()
    try:
        yield supervisor, client
    finally:
        await supervisor.stop()


async def reached(supervisor: Supervisor, state: EngineState) -> None:
    async with asyncio.timeout(20):
        while supervisor.state is not state:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


def test_streams_survive_ten_kills_with_identical_tokens() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            names = [f"r{i}" for i in range(8)]
            prompts = {name: (i, i + 1, i + 2) for i, name in enumerate(names)}
            for name in names:
                supervisor.submit(request(name, prompts[name], tokens=400))
            for kill in range(10):
                goal = 30 * (kill + 1)
                await client.until(lambda goal=goal: all(len(client.tokens.get((n, 0), ())) >= goal for n in names))
                assert supervisor.pid is not None
                os.kill(supervisor.pid, signal.SIGKILL)
            await client.until(lambda: len(client.ends) == len(names))
            for name in names:
                assert client.ends[name, 0].finish == "length"
                assert client.tokens[name, 0] == expected(prompts[name], 400)
            assert supervisor.restarts == 10
            assert supervisor.state is EngineState.READY

    run(body)


def test_choices_of_one_request_survive_a_kill() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            supervisor.submit(request("r", tokens=120, n=3))
            await client.until(lambda: len(client.tokens.get(("r", 2), ())) >= 10)
            os.kill(supervisor.pid or 0, signal.SIGKILL)
            await client.until(lambda: len(client.ends) == 3)
            # The first token of a forked choice comes from the shared prompt row.
            for choice in range(3):
                assert client.tokens["r", choice] == expected((1, 2, 3), 120, choice)

    run(body)


def test_a_poison_request_is_singled_out_and_the_others_finish() -> None:
    async def body() -> None:
        async with supervised("poison:666") as (supervisor, client):
            for i in range(6):
                supervisor.submit(request(f"r{i}", (i, 7), tokens=60))
            await client.until(lambda: len(client.tokens) == 6)
            supervisor.submit(request("bad", (1, 666)))
            await client.until(lambda: len(client.ends) == 7)
            assert client.ends["bad", 0].finish == "error"
            assert client.ends["bad", 0].culprit
            for i in range(6):
                assert client.tokens[f"r{i}", 0] == expected((i, 7), 60)
            assert supervisor.restarts == 2

    run(body)


def test_a_hung_step_is_killed_and_its_request_quarantined() -> None:
    async def body() -> None:
        async with supervised("hang:666", hang_seconds=1.5) as (supervisor, client):
            supervisor.submit(request("bad", (666,)))
            await asyncio.sleep(0.1)
            supervisor.submit(request("good", (5,), tokens=10))
            await client.until(lambda: len(client.ends) == 2)
            assert client.ends["bad", 0].culprit
            assert client.tokens["good", 0] == expected((5,), 10)

    run(body)


def test_requests_submitted_while_restarting_are_served() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            os.kill(supervisor.pid or 0, signal.SIGKILL)
            await reached(supervisor, EngineState.RESTARTING)
            supervisor.submit(request("late", tokens=5))
            await client.until(lambda: len(client.ends) == 1)
            assert client.tokens["late", 0] == expected((1, 2, 3), 5)

    run(body)


def test_an_aborted_suspect_does_not_hold_up_the_replay() -> None:
    async def body() -> None:
        async with supervised("poison:666") as (supervisor, client):
            restarted = asyncio.Event()
            supervisor.on_restart = restarted.set
            supervisor.submit(request("bad", (666,)))
            supervisor.submit(request("good", (5,), tokens=10))
            await restarted.wait()
            supervisor.abort("bad")
            await client.until(lambda: ("good", 0) in client.ends)
            assert client.tokens["good", 0] == expected((5,), 10)

    run(body)


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


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ("fail-config", ConfigError, "--kv-memory"),
        ("fail-model", ModelLoadError, "model.safetensors"),
        ("exit-at-start", EngineDead, "exited with code 3"),
    ],
)
def test_a_failed_start_says_why(model: str, error: type[Exception], text: str) -> None:
    async def body() -> None:
        supervisor = Supervisor(EngineConfig(model=model), program=FAKE)
        with pytest.raises(error, match=text):
            await supervisor.start()
        await supervisor.stop()

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


def send_garbage(supervisor: Supervisor) -> None:
    assert supervisor._process is not None
    supervisor._process.data_received(b"\xff" * 64)


def test_garbage_from_the_engine_restarts_it() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            supervisor.submit(request("r", tokens=200))
            await client.until(lambda: bool(client.tokens))
            send_garbage(supervisor)
            await client.until(lambda: bool(client.ends))
            assert client.tokens["r", 0] == expected((1, 2, 3), 200)
            assert supervisor.restarts == 1

    run(body)


def test_requests_submitted_while_the_old_engine_is_ending_are_served() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            os.kill(supervisor.pid or 0, signal.SIGSTOP)  # so that it takes the supervisor a second to end it
            send_garbage(supervisor)
            await asyncio.sleep(0.05)
            supervisor.submit(request("late", tokens=5))
            await client.until(lambda: len(client.ends) == 1)
            assert client.tokens["late", 0] == expected((1, 2, 3), 5)

    run(body)


def test_an_engine_that_had_to_be_killed_counts_as_failed() -> None:
    """Its SIGKILL is ours: not the operator's, which would be excused."""

    async def body() -> None:
        async with supervised(max_restarts=0) as (supervisor, client):
            supervisor.submit(request("r", tokens=1000))
            await client.until(lambda: bool(client.tokens))
            os.kill(supervisor.pid or 0, signal.SIGSTOP)
            send_garbage(supervisor)
            await asyncio.wait_for(asyncio.shield(supervisor.dead), 20)

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


def test_a_program_that_cannot_be_launched_is_one_clear_line() -> None:
    async def body() -> None:
        with pytest.raises(EngineDead, match="/no/such/program"):
            await Supervisor(EngineConfig(model="ok"), program=("/no/such/program",)).start()

    run(body)

    run(body)


def test_an_engine_that_cannot_even_be_started_again_is_given_up() -> None:
    async def body() -> None:
        async with supervised(max_restarts=2) as (supervisor, client):
            supervisor._program = ("/no/such/program",)
            supervisor.submit(request("r", tokens=1000))
            os.kill(supervisor.pid or 0, signal.SIGSEGV)
            await asyncio.wait_for(asyncio.shield(supervisor.dead), 20)
            assert client.ends["r", 0].finish == "error"

    run(body)


def test_a_suspect_given_up_by_its_client_is_not_paid_for_by_the_next() -> None:
    """The engine still hangs in the aborted request's step when the next suspect is sent."""

    async def body() -> None:
        async with supervised("hang:666", hang_seconds=1.5) as (supervisor, client):
            restarted = asyncio.Event()
            supervisor.on_restart = restarted.set
            supervisor.submit(request("bad", (666,)))
            supervisor.submit(request("good", (5,), tokens=10))
            await restarted.wait()
            await reached(supervisor, EngineState.READY)
            await asyncio.sleep(0.1)  # the engine is in the middle of its step
            supervisor.abort("bad")
            await client.until(lambda: ("good", 0) in client.ends)
            assert client.tokens["good", 0] == expected((5,), 10)

    run(body)


def test_a_failing_receiver_does_not_cost_the_engine() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            failures = ["only once"]

            def on_step(step: StepOutput) -> None:
                client.on_step(step)
                if failures:
                    raise RuntimeError(failures.pop())

            supervisor.on_step = on_step
            supervisor.submit(request("r"))
            await client.until(lambda: bool(client.ends))
            await asyncio.sleep(0.2)
            assert client.tokens["r", 0] == expected((1, 2, 3), 40)
            assert supervisor.restarts == 0

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
            await asyncio.wait_for(asyncio.shield(supervisor.dead), 20)
            assert client.ends["r", 0].finish == "error"

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
