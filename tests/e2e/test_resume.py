"""`kill -9` of the engine under live streams: every client gets its complete, identical text on the same connection."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from e2e.served import Served
from e2e.streams import Streamed, client, stream

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
            progress = [0] * 8

            def watch(i: int) -> Any:
                def on_chunk(seen: Streamed) -> None:
                    progress[i] = len(seen.token_ids)

                return on_chunk

            tasks = [asyncio.create_task(stream(http, r, on_chunk=watch(i))) for i, r in enumerate(bodies())]
            for kill in range(kills):
                async with asyncio.timeout(300):
                    while min(progress) < (kill + 1) * TOKENS // (kills + 1):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                os.kill(server.engine().pid, signal.SIGKILL)
            killed = await asyncio.gather(*tasks)
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
