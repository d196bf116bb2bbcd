"""Trained models over HTTP: streams are equal alone, together, from cached prefixes and over a killed engine."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

from e2e.served import Served
from e2e.streams import Streamed, client, stream
from real.recorded import PROSE

STREAMS, TOKENS = 4, 80


def bodies() -> list[dict[str, Any]]:
    """Greedy and drawn; the prompts repeat themselves, so that guesses are often right."""
    beginning = PROSE[:400]
    return [
        {
            "prompt": f"{beginning}\n\n{beginning[: 40 * (number + 1)]}",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "temperature": 0.7 if number % 2 else 0.0,
            "seed": number,
        }
        for number in range(STREAMS)
    ]


async def all_at_once(server: Served, *, killed: bool = False) -> list[Streamed]:
    """All streams; with `killed` the engine is killed when all have begun and one has a quarter of its tokens."""
    progress = [0] * STREAMS
    far = asyncio.Event()

    async def one(http: httpx.AsyncClient, number: int, body: dict[str, Any]) -> Streamed:
        def on_chunk(seen: Streamed) -> None:
            progress[number] = len(seen.token_ids)
            if min(progress) > 0 and max(progress) > TOKENS // 4:
                far.set()

        return await stream(http, body, on_chunk=on_chunk)

    async with client(server.url) as http:
        tasks = [asyncio.create_task(one(http, number, body)) for number, body in enumerate(bodies())]
        if killed:
            await far.wait()
            assert min(progress) < TOKENS, "a stream must still be running"
            os.kill(server.engine().pid, signal.SIGKILL)
        return await asyncio.gather(*tasks)


async def one_by_one(server: Served) -> list[Streamed]:
    async with client(server.url) as http:
        return [await stream(http, body | {"speculation": False, "cache_salt": "alone"}) for body in bodies()]


def told(streams: list[Streamed]) -> list[tuple[list[int], list[float], str]]:
    assert all(each.errors == [] and each.done for each in streams)
    return [(each.token_ids, each.logprobs, each.text) for each in streams]


@pytest.mark.timeout(900)
def test_streams_are_the_same_together_with_guesses_and_over_a_killed_engine(server: Served) -> None:
    wanted = told(asyncio.run(one_by_one(server)))
    assert told(asyncio.run(all_at_once(server))) == wanted
    assert server.metric("quire_spec_decode_accepted_tokens_total") > TOKENS
    before = server.metric("quire_engine_restarts_total")
    assert told(asyncio.run(all_at_once(server, killed=True))) == wanted
    assert server.metric("quire_engine_restarts_total") == before + 1
    assert told(asyncio.run(all_at_once(server))) == wanted
    server.wait_idle()
