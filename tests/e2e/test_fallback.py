"""Models of many kinds over HTTP, by our layers or transformers' code: streams, cached prefixes, preemption, `kill -9`,
int4, images."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from e2e.served import Served
from e2e.streams import client, over_kills, stream
from quire_engine.build import resolve_plan
from support.checkpoints import VOCAB_SIZE, write_tokenizer
from support.limits import engine_config
from sweep.__main__ import save_random, tiny

pytestmark = pytest.mark.e2e

FAMILIES = ("gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_5_text", "phi3", "granite")
FEW = {"gpt_oss"}  # sliding windows with experts; what the others do, also recurrent states, is in model tests
NATIVE = {"gemma3_text", "gpt_oss", "qwen3_moe", "phi3", "granite"}
RECURRENT = {"qwen3_5_text"}
TOKENS, STREAMS, BLOCKS = 80, 4, 16
ROUNDS = 10
"""Of streams together, at most, until one is preempted: on a busy machine the first may end before the last enters."""


def bodies() -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{i}: The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 2,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "temperature": 0.0 if i % 2 else 0.9,
            "seed": 1000 + i,
        }
        for i in range(STREAMS)
    ]


@pytest.mark.parametrize("family", [pytest.param(x, marks=() if x in FEW else pytest.mark.matrix) for x in FAMILIES])
def test_a_family_is_served_as_our_own_are(family: str, tmp_path: Path):
    folder, packed = tmp_path / family, tmp_path / "packed"
    save_random(tiny(family, vocab_size=VOCAB_SIZE), folder, torch.bfloat16)
    write_tokenizer(folder)
    plan = resolve_plan(engine_config(model=str(folder), device="cpu", quantization="int4", max_model_len=256))
    blocks, longest = BLOCKS, 256
    if any(window is not None for window in plan.scheduler.windows):  # which let go of blocks, so fewer are enough
        longest = 128
        blocks = plan.scheduler.num_blocks_for(longest)
    flags = ("--quantization", "int4", "--max-model-len", str(longest), "--packed-cache", str(packed))
    flags += ("--device", "cpu")

    async def body(server: Served) -> None:
        async with client(server.url) as http:
            alone = [await stream(http, request) for request in bodies()]
            assert all(each.done and len(each.token_ids) == TOKENS for each in alone)
            for _ in range(ROUNDS):
                beside = await asyncio.gather(*(stream(http, request) for request in bodies()))
                assert [each.token_ids for each in beside] == [each.token_ids for each in alone]
                if server.metric("quire_preemptions_total") > 0:
                    break
            else:
                raise AssertionError(f"no stream was preempted in {ROUNDS} rounds")
            before = server.metric("quire_engine_restarts_total")
            together = await over_kills(server, http, bodies(), [TOKENS // 3], of=max)
            assert server.metric("quire_engine_restarts_total") == before + 1
        for one, other in zip(alone, together, strict=True):
            assert other.errors == []
            assert (other.token_ids, other.text, other.done) == (one.token_ids, one.text, True)
        server.wait_idle()

    size = str(blocks * plan.pool.bytes_per_block)
    with Served(str(folder), "--kv-memory", size, *flags, limits="admission=prompt") as server:
        assert ("by transformers" in server.log()) == (family not in NATIVE)
        assert (cached_tokens(server) > 0) == (family not in RECURRENT)
        asyncio.run(body(server))
        refused = httpx.post(
            server.url + "/v1/chat/completions",
            json={"model": family, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        )
        assert refused.status_code == 400
        assert "image_url" in refused.json()["error"]["message"]


def cached_tokens(server: Served) -> int:
    """Of a prompt that is asked for a second time."""
    body = {
        "prompt": "A quire is four sheets of paper folded into eight leaves; a ream is twenty quires.",
        "max_tokens": 2,
    }
    for _ in range(2):
        reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    found = reply["usage"]["prompt_tokens_details"]
    return found["cached_tokens"] if found else 0
