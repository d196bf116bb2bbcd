"""A supervisor without an engine for a while: what waits goes on with the same tokens, in the order of arrival."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, CrashLoop, EngineDead, ModelLoadError
from quire_server.engine.models.sleeping import SleepingSupervisor
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import EngineState
from support.fake_engine_process import make_plan
from support.plans import changed
from support.supervising import FAKE, Client, expected, reached, request, run, supervised

PROMPT = (1, 2, 3)


def test_streams_go_on_with_the_same_tokens_after_a_sleep():
    async def body() -> None:
        async with supervised(kind=SleepingSupervisor) as (supervisor, client):
            for number in range(4):
                supervisor.submit(request(f"r{number}", (number, 7), tokens=120, n=1 + number % 2))
            await client.until(lambda: len(client.tokens.get(("r0", 0), ())) > 5)
            for keeps in (True, False):
                await supervisor.sleep(keeps_weights=keeps)
                assert supervisor.state is EngineState.ASLEEP
                assert supervisor.pid is None
                assert not client.ends
                assert supervisor.trouble() == "engine asleep"
                assert not supervisor.is_stuck
                await supervisor.wake()
                so_far = len(client.tokens["r0", 0])
                await client.until(lambda: len(client.tokens["r0", 0]) > so_far + 5)  # noqa: B023
            await client.until(lambda: len(client.ends) == 6)
            assert supervisor.restarts == 0, "a sleep is no failure"
        for number in range(4):
            for choice in range(1 + number % 2):
                assert client.tokens[f"r{number}", choice] == expected((number, 7), 120, choice)
                assert client.ends[f"r{number}", choice].finish == "length"

    run(body)


def test_what_comes_meanwhile_waits_in_its_order_and_asks_for_the_engine():
    async def body() -> None:
        async with supervised(kind=SleepingSupervisor) as (supervisor, client):
            wanted: list[int] = []
            supervisor.on_wanted = lambda: wanted.append(supervisor.num_live)
            await supervisor.sleep(keeps_weights=True)
            for name in ("a", "b", "c", "gone"):
                supervisor.submit(request(name, tokens=3))
            supervisor.abort("gone")
            supervisor.hold_request("b")
            assert wanted == [1, 2, 3, 4]
            assert supervisor.num_live == 2, "a request whose client does not read wants no engine"
            await supervisor.wake()
            await client.until(lambda: {("a", 0), ("c", 0)} <= client.ends.keys())
            assert ("b", 0) not in client.tokens
            supervisor.release_request("b")
            await client.until(lambda: ("b", 0) in client.ends)
            assert ("gone", 0) not in client.tokens
            assert client.tokens["b", 0] == expected(PROMPT, 3)

    run(body)


def test_an_engine_is_expected_before_its_first_start():
    async def body() -> None:
        supervisor = SleepingSupervisor(
            EngineConfig(model="ok"), RestartPolicy(first_backoff_seconds=0.01), program=FAKE
        )
        client = Client()
        supervisor.on_step = client.on_step
        supervisor.expect(make_plan())
        assert supervisor.state is EngineState.ASLEEP
        assert supervisor.plan == make_plan()
        supervisor.submit(request("early", tokens=4))
        plan = await supervisor.wake()
        assert plan.scheduler.max_model_len == make_plan().scheduler.max_model_len
        await client.until(lambda: ("early", 0) in client.ends)
        assert client.tokens["early", 0] == expected(PROMPT, 4)
        await supervisor.stop()

    run(body)


@pytest.mark.parametrize(
    ("model", "error"),
    [("fail-config", ConfigError), pytest.param("exit-at-start", CrashLoop, marks=pytest.mark.matrix)],
    ids=["refused", "crashes"],
)
def test_who_waits_for_an_engine_that_cannot_start_is_told(model: str, error: type[Exception]):
    async def body() -> None:
        policy = RestartPolicy(first_backoff_seconds=0.01, max_restarts=1)
        supervisor = SleepingSupervisor(EngineConfig(model=model), policy, program=FAKE)
        client = Client()
        supervisor.on_step = client.on_step
        supervisor.expect(make_plan())
        supervisor.submit(request("r", n=2))
        for _ in range(2):  # what has failed is forgiven by the next sleep
            with pytest.raises(error):
                await supervisor.wake()
            assert supervisor.state is EngineState.DEAD
            await supervisor.sleep(keeps_weights=False)
            assert supervisor.state is EngineState.ASLEEP
        assert {end.finish for end in client.ends.values()} == {"error"}
        assert len(client.ends) == 2
        await supervisor.stop()

    run(body)


@pytest.mark.matrix  # a kill right before a sleep is in the tests beside it
def test_a_kill_while_the_engine_wakes_is_a_later_wake():
    async def body() -> None:
        async with supervised("slow-start", kind=SleepingSupervisor) as (supervisor, client):
            supervisor.submit(request("r", tokens=60))
            await client.until(lambda: len(client.tokens.get(("r", 0), ())) > 3)
            await supervisor.sleep(keeps_weights=True)
            waking = asyncio.create_task(supervisor.wake())
            while supervisor.progress is None:  # noqa: ASYNC110 - it is looked at, not told
                await asyncio.sleep(0.005)
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            await waking
            await client.until(lambda: ("r", 0) in client.ends)
            assert client.tokens["r", 0] == expected(PROMPT, 60)

    run(body)


def test_a_kill_right_before_a_sleep_blames_nobody():
    async def body() -> None:
        async with supervised(kind=SleepingSupervisor) as (supervisor, client):
            supervisor.submit(request("r", tokens=80))
            await client.until(lambda: len(client.tokens.get(("r", 0), ())) > 3)
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            await supervisor.sleep(keeps_weights=True)
            await supervisor.wake()
            await reached(supervisor, EngineState.READY)
            await client.until(lambda: ("r", 0) in client.ends)
            assert client.tokens["r", 0] == expected(PROMPT, 80)

    run(body)


@pytest.mark.matrix  # waits for an engine that is slow to end
def test_a_stop_ends_what_waits_and_a_wake_after_it_is_refused():
    async def body() -> None:
        async with supervised("slow-start", kind=SleepingSupervisor) as (supervisor, client):
            await supervisor.sleep(keeps_weights=True)
            supervisor.submit(request("r"))
            waking = asyncio.create_task(supervisor.wake())
            await asyncio.sleep(0.05)
            await supervisor.stop()
            with pytest.raises(EngineDead):
                await waking
            assert client.ends["r", 0].finish == "error"
            assert supervisor.state is EngineState.STOPPED
            assert supervisor.pid is None

    run(body)


def test_other_files_than_those_that_requests_began_with_are_not_gone_on_with():
    async def body() -> None:
        supervisor = SleepingSupervisor(EngineConfig(model="ok"), program=FAKE)
        client = Client()
        supervisor.on_step = client.on_step
        supervisor.expect(changed(make_plan(), identity={"checkpoint": "of yesterday"}))
        supervisor.submit(request("r"))
        with pytest.raises(ModelLoadError, match="changed on disk"):
            await supervisor.wake()
        assert client.ends["r", 0].finish == "error"
        assert supervisor.state is EngineState.DEAD
        assert supervisor.pid is None
        await supervisor.stop()

    run(body)
