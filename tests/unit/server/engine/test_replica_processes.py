"""Several real engine processes with invented tokens behind one port: kills, silence, a culprit."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from quire_engine.contract.config import EngineConfig
from quire_server.engine.local_replicas import LocalReplicas
from quire_server.engine.replica_routing import Router
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import EngineState, Supervisor
from support.supervising import FAKE, Client, expected, request, run


@asynccontextmanager
async def served(count: int = 2, model: str = "ok") -> AsyncIterator[tuple[LocalReplicas, Client]]:
    together = LocalReplicas(
        EngineConfig(model=model),
        RestartPolicy(first_backoff_seconds=0.01, absent_seconds=2.0, hang_seconds=60.0),
        count=count,
        router=Router("least_tokens"),
        make=partial(Supervisor, program=FAKE),
    )
    client = Client()
    together.on_step = client.on_step
    await together.start()
    try:
        yield together, client
    finally:
        await together.stop()


def pids(together: LocalReplicas) -> list[int]:
    return [each.pid or 0 for each in together._engines.values()]


def test_streams_survive_kills_of_either_engine_with_identical_tokens() -> None:
    async def body() -> None:
        async with served() as (together, client):
            names = [f"r{i}" for i in range(8)]  # twelve sequences, which one engine can seat
            for i, name in enumerate(names):
                together.submit(request(name, (i, i + 1), tokens=200, n=1 + i % 2))
            for kill in range(2):
                goal = 50 * (kill + 1)
                await client.until(lambda goal=goal: all(len(client.tokens.get((n, 0), ())) >= goal for n in names))
                os.kill(pids(together)[kill % 2], signal.SIGKILL)
            await client.until(lambda: len(client.ends) == 12)
            for i, name in enumerate(names):
                for choice in range(1 + i % 2):
                    assert client.tokens[name, choice] == expected((i, i + 1), 200, choice)
            assert sum(row.restarts for row in together.rows()) == 2

    run(body)


@pytest.mark.matrix  # one engine: test_supervisor_faults.py; silent nodes: test_node_streams.py
def test_a_stopped_engine_is_lost_after_the_silence_and_not_before() -> None:
    async def body() -> None:
        async with served() as (together, client):
            for i in range(4):
                together.submit(request(f"r{i}", (i, 7), tokens=900))
            await client.until(lambda: len(client.tokens) == 4)
            victim = pids(together)[0]
            os.kill(victim, signal.SIGSTOP)
            stopped = time.monotonic()
            await client.until(lambda: len(client.ends) == 4)
            assert time.monotonic() - stopped > 1.5
            for i in range(4):
                assert client.tokens[f"r{i}", 0] == expected((i, 7), 900)
            assert victim not in pids(together)

    run(body)


@pytest.mark.matrix  # nodes do the same in test_node_streams.py
def test_a_poison_request_ends_two_engines_and_its_mates_get_their_tokens() -> None:
    async def body() -> None:
        async with served(4, "poison:666") as (together, client):
            for i in range(8):
                together.submit(request(f"r{i}", (i, 7), tokens=200))
            await client.until(lambda: len(client.tokens) == 8)
            together.submit(request("bad", (1, 666)))
            await client.until(lambda: len(client.ends) == 9)
            assert client.ends["bad", 0].culprit
            for i in range(8):
                assert client.tokens[f"r{i}", 0] == expected((i, 7), 200)
            async with asyncio.timeout(300):
                while any(each.state is not EngineState.READY for each in together._engines.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert sum(row.restarts for row in together.rows()) == 2

    run(body)


def test_a_rolling_drain_moves_every_stream_and_ends_none() -> None:
    async def body() -> None:
        async with served(2) as (together, client):
            for i in range(6):
                together.submit(request(f"r{i}", (i, 5), tokens=400))
            await client.until(lambda: len(client.tokens) == 6)
            for name in ("0", "1"):
                row = together.drain(name, draining=True)
                assert row is not None
                assert row.streams == 0
                seen = sum(map(len, client.tokens.values()))
                await client.until(lambda seen=seen: sum(map(len, client.tokens.values())) > seen + 90)
                together.drain(name, draining=False)
            await client.until(lambda: len(client.ends) == 6)
            for i in range(6):
                assert client.tokens[f"r{i}", 0] == expected((i, 5), 400)
            assert sum(row.restarts for row in together.rows()) == 0

    run(body)
