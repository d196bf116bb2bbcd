"""Several engines in turn: who has one, who waits for one, and what becomes of requests meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import EngineDead
from quire_server.engine.models import model_set
from quire_server.engine.models.model_set import PROCESS_BYTES, ModelEngine, ModelSet, Residency
from quire_server.engine.models.sleeping import SleepingSupervisor
from quire_server.engine.restart_policy import RestartPolicy
from support.fake_engine_process import make_plan
from support.plans import changed
from support.supervising import FAKE, Client, expected, request, run

PROMPT = (1, 2, 3)
TWO = 2 * PROCESS_BYTES + 1000  # bytes for two engines
TURN = 0.2


@asynccontextmanager
async def models(*names: str, kind: str = "ok", **residency: Residency) -> AsyncIterator[tuple[ModelSet, Client]]:
    """Models with room for two engines, which invent tokens."""
    client, engines = Client(), []
    for name in names:
        policy = RestartPolicy(first_backoff_seconds=0.01, max_restarts=1)
        supervisor = SleepingSupervisor(EngineConfig(model=kind), policy, program=FAKE)
        supervisor.on_step = client.on_step
        plan = changed(make_plan(kind), model={"weights_bytes": 10}, pool={"num_bytes": 10})
        engines.append(ModelEngine(name, supervisor, plan, residency.get(name, Residency())))
    made = ModelSet(engines, budget=TWO, turn_seconds=TURN)
    running = asyncio.create_task(made.run())
    try:
        yield made, client
    finally:
        await made.stop()
        await running


def submit(made: ModelSet, name: str, request_id: str, tokens: int = 40) -> None:
    made.used(name)
    made.engines[name].supervisor.submit(request(request_id, tokens=tokens))


def states(made: ModelSet) -> list[str]:
    return [engine.state for engine in made.engines.values()]


async def until(made: ModelSet, *wanted: str) -> None:
    async with asyncio.timeout(300):
        while states(made) != list(wanted):  # noqa: ASYNC110 - it is looked at, not told
            await asyncio.sleep(0.01)


async def ended(client: Client, number: int) -> None:
    await client.until(lambda: len(client.ends) == number)


def taken(made: ModelSet) -> int:
    return sum(engine.memory_bytes for engine in made.engines.values())


def test_a_model_is_loaded_when_a_request_comes_and_makes_way_when_it_is_idle():
    async def body() -> None:
        async with models("a", "b", "c") as (made, client):
            assert states(made) == ["unloaded"] * 3
            assert made.trouble() is None
            assert made.trouble_of("a") == "model unloaded"
            assert made.seconds_until_loaded("a") > 0
            for name in ("a", "b", "c", "a"):
                submit(made, name, f"{name}{len(client.ends)}")
                await ended(client, len(client.ends) + 1)
                assert taken(made) <= TWO
            assert states(made) == ["loaded", "unloaded", "loaded"], "the longest unused has made way"
            assert made.trouble_of("a") is None
            assert made.seconds_until_loaded("a") == 0
        assert all(tokens == expected(PROMPT, 40) for tokens in client.tokens.values())

    run(body)


def test_busy_models_take_turns_and_every_stream_has_the_same_tokens():
    async def body() -> None:
        async with models("a", "b", "c") as (made, client):
            for name in ("a", "b", "c"):
                for number in range(2):
                    submit(made, name, f"{name}{number}", tokens=150)
            most = 0
            while len(client.ends) < 6:
                most = max(most, taken(made))
                assert sum(engine.has_engine for engine in made.engines.values()) <= 2
                await asyncio.sleep(0.01)
            assert 0 < most <= TWO
        assert all(tokens == expected(PROMPT, 150) for tokens in client.tokens.values())
        assert {end.finish for end in client.ends.values()} == {"length"}

    run(body)


def test_a_pinned_model_is_loaded_at_once_and_stays():
    async def body() -> None:
        async with models("a", "b", "c", a=Residency(pinned=True, idle_seconds=0.01)) as (made, client):
            await until(made, "loaded", "unloaded", "unloaded")
            for name in ("b", "c", "b"):
                submit(made, name, f"{name}{len(client.ends)}")
                await ended(client, len(client.ends) + 1)
                assert made.engines["a"].state == "loaded"

    run(body)


def test_an_idle_model_goes_after_its_seconds_and_a_wish_changes_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_set, "_PREPARING_SECONDS", 0.1)

    async def body() -> None:
        async with models("a", "b", a=Residency(idle_seconds=0.2)) as (made, client):
            submit(made, "a", "a0")
            submit(made, "b", "b0")
            await client.until(lambda: len(client.ends) == 2)
            await until(made, "unloaded", "loaded")
            made.keep("b", 0.0, shortens=False)
            assert made.engines["b"].idle_limit == float("inf"), "the operator has said nothing: it stays"
            made.keep("b", 0.0, shortens=True)
            made.keep("a", 0.0, shortens=False)
            assert made.engines["a"].idle_limit == 0.2
            made.keep("a", float("inf"), shortens=False)
            submit(made, "a", "a1")
            await client.until(lambda: len(client.ends) == 3)
            await until(made, "loaded", "unloaded")
            await asyncio.sleep(0.6)
            assert states(made) == ["loaded", "unloaded"]

    run(body)


def test_an_order_puts_a_busy_model_away_until_it_is_asked_for_again():
    async def body() -> None:
        async with models("a", "b") as (made, client):
            submit(made, "a", "a0", tokens=300)
            await client.until(lambda: len(client.tokens.get(("a0", 0), ())) > 5)
            await made.put_away("a", level=2)
            assert states(made) == ["unloaded", "unloaded"]
            await asyncio.sleep(0.4)
            assert states(made) == ["unloaded", "unloaded"]
            assert not client.ends, "its requests are held"
            submit(made, "a", "a1", tokens=5)
            await client.until(lambda: len(client.ends) == 2)
            await made.put_away("a", level=1)
            await made.load("a")
            assert states(made) == ["loaded", "unloaded"]
        assert client.tokens["a0", 0] == expected(PROMPT, 300)

    run(body)


@pytest.mark.matrix  # busy models that take turns are tried beside it
def test_a_model_of_higher_priority_is_served_first_and_keeps_its_memory_while_it_is_busy():
    async def body() -> None:
        high = Residency(priority=1)
        async with models("a", "b", "c", a=high, b=high) as (made, client):
            for name in ("c", "a", "b"):
                submit(made, name, name, tokens=300)
            await client.until(lambda: len(client.ends) == 3, 40)
            assert list(client.ends)[-1] == ("c", 0)

    run(body)


def test_a_model_that_cannot_be_started_is_no_trouble_of_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_set, "FAILED_SECONDS", 3600.0)

    async def body() -> None:
        async with models("bad", "good") as (made, client):
            bad = made.engines["bad"].supervisor
            bad._config = EngineConfig(model="fail-model")
            submit(made, "bad", "r0")
            submit(made, "good", "r1")
            await client.until(lambda: len(client.ends) == 2)
            assert client.ends["r0", 0].finish == "error"
            assert client.ends["r1", 0].finish == "length"
            assert states(made) == ["failed", "loaded"]
            assert made.trouble() is None
            assert made.refused_for("good") is None
            wait = made.refused_for("bad")
            assert wait is not None
            assert 3000.0 <= wait <= 3600.0
            assert "model.safetensors is missing" in made.engines["bad"].why
            with pytest.raises(EngineDead, match="missing"):
                await made.load("bad")
            monkeypatch.setattr(model_set, "FAILED_SECONDS", 0.0)
            await until(made, "unloaded", "loaded")  # after its seconds it may be asked for again
            assert made.refused_for("bad") is None
            bad._config = EngineConfig(model="ok")
            submit(made, "bad", "r2")
            await client.until(lambda: ("r2", 0) in client.ends)
            assert client.ends["r2", 0].finish == "length"
            assert made.engines["bad"].why == ""

    run(body)


@pytest.mark.matrix  # as a model that cannot be started; loops of crashes: test_supervisor_ends.py
def test_an_engine_that_fails_too_often_is_told_and_others_go_on():
    async def body() -> None:
        async with models("a", "b") as (made, client):
            submit(made, "a", "a0", tokens=3)
            await client.until(lambda: len(client.ends) == 1)
            made.engines["a"].supervisor._config = EngineConfig(model="exit-at-start")
            pid = made.engines["a"].supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(made, "failed", "unloaded")
            assert made.refused_for("a") is not None
            submit(made, "b", "b0", tokens=3)
            await client.until(lambda: ("b0", 0) in client.ends)
            assert client.ends["b0", 0].finish == "length"

    run(body)
