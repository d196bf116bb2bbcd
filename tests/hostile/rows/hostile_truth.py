"""Whether the server says the truth: what it counts, what streams hold, the same answer a thousand times.

Promises: each row's figures are printed, kept or broken. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from typing import Any

import httpx

from e2e.served import Served
from e2e.streams import client, stream
from hostile.row import Row

REQUESTS = 2000
LEAVE = 0.2
STREAMS = 64
TIMES = 1000
CLIENTS = 24
POOL_REQUESTS = 1.2
SILENCE_SECONDS = 5.0
MOST_PREEMPTIONS = 4  # of a request, on average


async def accounting(server: Served) -> str:
    """What clients have counted of two thousand requests is what the metrics say."""
    outcomes = {
        name: server.metric("quire_requests_total", outcome=name) for name in ("stop", "length", "abort", "error")
    }
    tokens = server.metric("quire_generation_tokens_total")
    dice = random.Random(54)
    told = {"prompt": 0, "generated": 0, "finished": 0, "left": 0}
    async with client(server.url) as http:

        async def one(number: int) -> None:
            body: dict[str, Any] = {"prompt": f"{number}, 2,", "max_tokens": 5 + number % 40, "seed": number}
            if dice.random() < LEAVE:
                seen = await stream(
                    http, body | {"max_tokens": 500, "ignore_eos": True}, drop_after=dice.choice((1, 3))
                )
                assert seen.status == 200
                told["left"] += 1
                return
            usage = (await http.post("/v1/completions", json=body)).raise_for_status().json()["usage"]
            told["generated"] += usage["completion_tokens"]
            told["finished"] += 1

        numbers = iter(range(REQUESTS))

        async def worker() -> None:
            for number in numbers:
                await one(number)

        await asyncio.gather(*(worker() for _ in range(CLIENTS)))
    await asyncio.to_thread(server.wait_idle)
    grown = {name: server.metric("quire_requests_total", outcome=name) - was for name, was in outcomes.items()}
    generated = server.metric("quire_generation_tokens_total") - tokens
    figures = f"clients {told}, server {grown}, {generated:g} tokens"
    assert grown["stop"] + grown["length"] == told["finished"], figures
    assert grown["abort"] == told["left"], figures
    assert grown["error"] == 0, figures
    assert generated >= told["generated"], figures  # and some of those that left
    return figures


async def integrity(server: Served) -> str:
    """A stream says what a whole answer says, once, with one end, one usage and one last line."""
    async with client(server.url) as http:
        bodies = [
            {"prompt": f"{i}, {i + 1},", "max_tokens": 60, "temperature": 0.8, "seed": i, "ignore_eos": True}
            for i in range(STREAMS)
        ]
        whole = [(await http.post("/v1/completions", json=body)).raise_for_status().json() for body in bodies]
        streamed = await asyncio.gather(*(_events(http, body) for body in bodies))
    for reply, events in zip(whole, streamed, strict=True):
        assert events[-1] == "[DONE]", events[-1]
        assert events.count("[DONE]") == 1
        chunks = [json.loads(event) for event in events[:-1]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert "".join(choice["text"] for choice in choices) == reply["choices"][0]["text"]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert ends == [reply["choices"][0]["finish_reason"]], ends
        usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        assert usages == [reply["usage"]] or usages[0]["completion_tokens"] == reply["usage"]["completion_tokens"]
        assert len(usages) == 1
    return f"{STREAMS} at once: texts, ends, usages and last lines as they should be"


async def _events(http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=asked) as reply:
        assert reply.status_code == 200
        return [line[6:] async for line in reply.aiter_lines() if line.startswith("data: ")]


async def one_answer(server: Served) -> str:
    """One prompt a thousand times amid others of all lengths: one text, one list of log-probabilities, bit for bit."""
    asked = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 12, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    answers: set[str] = set()
    dice = random.Random(57)
    is_over = asyncio.Event()
    async with client(server.url) as http:

        async def ask() -> None:
            for _ in range(TIMES // 4):
                value = (await http.post("/v1/completions", json=asked)).raise_for_status().json()
                answers.add(json.dumps([value["choices"][0][name] for name in ("text", "logprobs")]))

        async def others() -> None:
            while not is_over.is_set():
                prompt = [dice.randrange(5, 300) for _ in range(dice.choice((1, 20, 300, 1200)))]
                body = {"prompt": prompt, "max_tokens": dice.choice((1, 20, 100)), "ignore_eos": True}
                drop = dice.choice((None, None, 2))
                await stream(http, body, drop_after=drop)

        load = [asyncio.create_task(others()) for _ in range(6)]
        await asyncio.gather(*(ask() for _ in range(4)))
        is_over.set()
        await asyncio.gather(*load)
    preempted = server.metric("quire_preemptions_total")
    assert len(answers) == 1, f"{len(answers)} different answers"
    return f"{TIMES} times amid random load, {preempted:g} preemptions: 1 answer"


async def small_pool(server: Served) -> str:
    """Room for one request and a fifth: sixty-four all end, as they do alone, and somebody always moves."""
    length = 512
    blocks = server.metric("quire_kv_pool_blocks")
    per_block = server.metric("quire_kv_bytes") / blocks
    room = int(length / 16 * POOL_REQUESTS) * int(per_block)
    bodies = [
        {"prompt": [5 + i] * (length // 4), "max_tokens": length // 2, "ignore_eos": True, "seed": i}
        for i in range(STREAMS)
    ]
    async with client(server.url) as http:
        alone = [(await stream(http, body)).text for body in bodies]
    flags = ("--max-model-len", str(length), "--kv-memory", str(room), "--set", "enable_prefix_caching=false")
    with Served(*flags, "--set", "check_invariants=true") as small:
        arrivals = [time.monotonic()]
        async with client(small.url) as http:
            seen = await asyncio.gather(
                *(stream(http, body, on_chunk=lambda _: arrivals.append(time.monotonic())) for body in bodies)
            )
        await asyncio.to_thread(small.wait_idle)
        preempted = small.metric("quire_preemptions_total")
        longest = max(later - earlier for earlier, later in itertools.pairwise(arrivals))
        figures = (
            f"{small.metric('quire_kv_pool_blocks'):g} blocks for {STREAMS} requests: {preempted:g} preemptions,"
            f" nobody got a token for {longest:.2f} s at most"
        )
    assert all(each.done for each in seen), figures
    assert [each.text for each in seen] == alone, figures
    assert longest < SILENCE_SECONDS, figures
    assert preempted <= MOST_PREEMPTIONS * STREAMS, figures
    return figures


ROWS = (
    Row(name="accounting", what="two thousand requests, a fifth of which leave", act=accounting),
    Row(name="integrity", what="sixty-four streams at once", act=integrity),
    Row(name="one-answer", what="one prompt a thousand times amid random load", act=one_answer),
    Row(name="small-pool", what="sixty-four where one and a fifth have room", act=small_pool),
)
