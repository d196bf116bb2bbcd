"""`kill -9` of the engine under live streams: every client gets its complete, identical text on the same connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from e2e.served import Served
from e2e.streams import client, over_kills, stream

pytestmark = pytest.mark.e2e

TOKENS = 330


def bodies() -> list[dict[str, Any]]:
    prompts = ["Once upon a time", "1, 2, 3,", "The capital of France is", "Hello", "A list:", "{", "My name is", "We"]
    return [
        {
            "prompt": prompt,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "temperature": 0.0 if i % 2 else 0.9,
            "seed": 1000 + i,
        }
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("kills", [pytest.param(10, marks=pytest.mark.matrix), 4])
def test_kills_under_eight_streams(kills: int) -> None:
    async def body(server: Served) -> None:
        async with client(server.url) as http:
            solo = [await stream(http, request) for request in bodies()]
            goals = [(kill + 1) * TOKENS // (kills + 1) for kill in range(kills)]
            killed = await over_kills(server, http, bodies(), goals)
        for alone, resumed in zip(solo, killed, strict=True):
            assert resumed.errors == []
            assert resumed.token_ids == alone.token_ids
            assert resumed.logprobs == alone.logprobs
            assert resumed.text == alone.text
            assert resumed.finish_reasons == ["length"]
            assert resumed.done
        assert server.metric("quire_engine_restarts_total") == kills
        server.wait_idle()

    with Served("--max-model-len", "2048") as server:
        asyncio.run(body(server))
