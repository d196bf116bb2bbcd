"""Chats with one system prompt that arrive at once, against a real server: the prompt is computed once."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from e2e.served import Served

pytestmark = pytest.mark.e2e

NUM_CHATS = 16
SYSTEM = [300 + 7 * position % 500 for position in range(200)]


async def _chats(url: str, start: int, num_tokens: int) -> list[dict[str, int]]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        replies = await asyncio.gather(
            *(
                http.post(
                    "/v1/completions",
                    json={
                        "prompt": [*SYSTEM, *(start + 31 * i + k for k in range(6))],
                        "max_tokens": num_tokens,
                        "ignore_eos": True,
                        "temperature": 0,
                    },
                )
                for i in range(NUM_CHATS)
            )
        )
    return [reply.raise_for_status().json()["usage"] for reply in replies]


def test_f11_sixteen_cold_chats_hold_one_system_prompt() -> None:
    """Twelve blocks are shared, of the thirteenth everyone has a copy; 208 blocks would be held without sharing."""

    async def body(server: Served) -> tuple[list[dict[str, int]], float, float]:
        most_shared = most_saved = 0.0
        sent = asyncio.ensure_future(_chats(server.url, 1000, 200))
        while not sent.done():
            await asyncio.sleep(0.01)
            most_shared = max(most_shared, await asyncio.to_thread(server.metric, "quire_kv_blocks_held", by="several"))
            most_saved = max(most_saved, await asyncio.to_thread(server.metric, "quire_kv_blocks_saved"))
        return await sent, most_shared, most_saved

    with Served("--itl-target", "0") as server:
        usage, most_shared, most_saved = asyncio.run(body(server))
        found = sorted(each["prompt_tokens_details"]["cached_tokens"] for each in usage)  # type: ignore[index]
        assert found == [0, *[200] * (NUM_CHATS - 1)]
        assert (most_shared, most_saved) == (12, 12 * (NUM_CHATS - 1))
        assert server.metric("quire_engine_computed_tokens_total", kind="prefill") == 200 + 6 * NUM_CHATS
        assert server.metric("quire_prefix_cache_hit_tokens_total") == 200 * (NUM_CHATS - 1)
        assert server.metric("quire_prefill_tokens_saved_total") == 200 * (NUM_CHATS - 1)
        assert server.metric("quire_prefill_seconds_saved_total") > 0
        server.wait_idle()
