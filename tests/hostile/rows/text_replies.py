"""Large replies: log-probabilities of long prompts, whole and streamed, and clients that do not read them."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import httpx

from e2e.served import Served
from hostile.row import Row
from hostile.rows.text_work import judged, post
from hostile.watch import Watch

_FLAGS = ("--max-body-bytes", "64MiB", "--max-num-queued-tokens", "1000000")
_PROMPT = [[17 + number] * 380 for number in range(60)]
READERS = 8


def _asked(**more: object) -> bytes:
    return json.dumps({"prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 20, **more}).encode()


async def _alone(server: Served, watch: Watch) -> float:
    """For how long others' streams are silent beside prompts as long, of which nothing is told."""
    prompts = [[900 + number] * 380 for number in range(60)]
    await post(server.url, "/v1/completions", json.dumps({"prompt": prompts, "max_tokens": 1}).encode())
    return (await watch.seen()).gap


async def prompt_logprobs(server: Served) -> str:
    """Of 60 prompts together more than 30 MB; the engine's work for as many prompts is what others feel anyway."""
    async with Watch(server.url, pid=server.process.pid) as watch:
        usual = await _alone(server, watch)
        status, size, seconds = await post(server.url, "/v1/completions", _asked())
        told = (
            f"answered {status} with {size >> 10} KiB in {seconds:.1f} s, the prompts alone make {usual * 1000:.0f} ms"
        )
        told = await judged(watch, told, usual)
        assert status == 200, told
        assert size > 30_000_000, told
        return told


async def echo(server: Served) -> str:
    """A stream that begins with its prompt; a prompt as long, without log-probabilities, is what it is held against."""
    body = {"prompt": [9] * 2000, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True}
    plain = {"prompt": [8] * 2000, "max_tokens": 1}
    async with Watch(server.url, pid=server.process.pid) as watch:
        await post(server.url, "/v1/completions", json.dumps(plain).encode())
        usual = (await watch.seen()).gap
        status, size, seconds = await post(server.url, "/v1/completions", json.dumps(body).encode())
        told = (
            f"answered {status} with {size >> 10} KiB in {seconds:.1f} s, the prompt alone makes {usual * 1000:.0f} ms"
        )
        return await judged(watch, told, usual)


async def unread(server: Served) -> str:
    """Replies of 5 MB each, of which the clients take the head only, and then nothing until they leave."""
    body = _asked(prompt=_PROMPT[:10])
    headers = {"content-type": "application/json"}
    async with Watch(server.url, pid=server.process.pid) as watch, AsyncExitStack() as readers:
        usual = await _alone(server, watch)
        client = await readers.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=120))
        for _ in range(READERS):
            await readers.enter_async_context(client.stream("POST", "/v1/completions", content=body, headers=headers))
        await asyncio.sleep(2.0)
        held = server.metric("quire_large_reply_bytes")
        await readers.aclose()
        await asyncio.sleep(2.0)
        told = await judged(watch, f"{held / 2**20:.0f} MiB of replies held while nobody read", usual)
        assert server.metric("quire_large_reply_bytes") == 0, told
        return told


ROWS = [
    Row(name="text-prompt-logprobs", what="32 MB of prompt log-probabilities", act=prompt_logprobs, flags=_FLAGS),
    Row(name="text-echo", what="a streamed echo of 2,000 tokens with log-probabilities", act=echo, flags=_FLAGS),
    Row(name="text-unread", what=f"{READERS} replies of 5 MB that nobody reads", act=unread, flags=_FLAGS),
]
