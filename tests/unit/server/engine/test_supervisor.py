"""The supervisor over a real child process with invented tokens: crashes, hangs and culprits, as clients see them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import CacheEvent, EngineStats, StepOutput
from quire_server.engine.supervisor import EngineState
from support.supervising import expected, reached, request, run, send_garbage, supervised


@pytest.mark.matrix  # in test_replica_processes.py with two engines; four kills: tests/e2e/test_resume.py
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


def test_a_restarted_engine_keeps_the_instruction_set_of_the_first() -> None:
    """Whatever it would measure by then: other instructions round otherwise, and answers would change midway."""

    async def body() -> None:
        async with supervised("picky") as (supervisor, client):
            supervisor.submit(request("r", tokens=200))
            await client.until(lambda: len(client.tokens.get(("r", 0), ())) >= 30)
            os.kill(supervisor.pid or 0, signal.SIGKILL)
            await client.until(lambda: ("r", 0) in client.ends)
            assert client.tokens["r", 0] == expected((1, 2, 3), 200)
            assert supervisor.restarts == 1

    run(body)


def test_a_listener_learns_when_an_engines_cache_begins_and_ends() -> None:
    class Listener:
        def __init__(self) -> None:
            self.said: list[str] = []

        def begins(self, plan: EnginePlan) -> None:
            self.said.append(f"begins {plan.scheduler.limits.block_size}")

        def changes(self, events: Sequence[CacheEvent]) -> None:
            self.said.append(f"changes {len(events)}")

        def ends(self) -> None:
            self.said.append("ends")

        def close(self) -> None:
            self.said.append("close")

    async def body() -> None:
        listener = Listener()
        async with supervised(listener=listener) as (supervisor, client):
            supervisor.submit(request("r", tokens=100))
            await client.until(lambda: len(client.tokens.get(("r", 0), ())) >= 10)
            os.kill(supervisor.pid or 0, signal.SIGKILL)
            await client.until(lambda: ("r", 0) in client.ends)
            supervisor._deliver(
                StepOutput(step_id=9, outputs=(), stats=EngineStats(), cache_events=(CacheEvent(blocks=(1,)),))
            )
        assert listener.said == ["begins 16", "ends", "begins 16", "changes 1", "close"]

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


@pytest.mark.matrix  # most of it waits for a hang, as beside it
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
