"""Long outputs and long prompts of one client, and the short requests of another beside them.

Promises: each row's figures are printed, kept or broken; each takes less than a minute. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial
from typing import Any

import httpx

from e2e.served import Served
from e2e.streams import client, stream
from hostile.row import Row
from hostile.two_tenants import ATTACKER, KEYS, VICTIM, unique

TURNS, MOST_RATIO = 60, 2.0
FEWEST, LONGEST = 3, 20.0  # requests, and seconds after which no further one is sent
THRASHING, PREEMPTIONS_EACH = 74, 2
RECOMPUTED, RECOMPUTED_APART = 0.1, 0.35  # of the computed tokens; different ones are computed again where that pays
MOST_WAIT, MOST_LONGER = 2.0, 1.15


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


async def _short(http: httpx.AsyncClient, key: str = "") -> tuple[float, float]:
    """A short request: seconds to its first token, and between two of its tokens."""
    came: list[float] = []
    body = {"prompt": unique(64), "max_tokens": 16, "ignore_eos": True, "stream": True}
    started = time.perf_counter()
    seen = await stream(
        http, body, on_chunk=lambda _: came.append(time.perf_counter()), headers={"x-api-key": key} if key else None
    )
    assert seen.status == 200, seen.errors
    return came[0] - started, (came[-1] - came[0]) / 15


async def _all(http: httpx.AsyncClient, key: str) -> dict[str, float]:
    """The victim's requests, one after the other: the 95th percentiles of their times, in seconds."""
    shorts, started = [], time.perf_counter()
    while len(shorts) < TURNS and (len(shorts) < FEWEST or time.perf_counter() < started + LONGEST):
        shorts.append(await _short(http, key))
        await asyncio.sleep(0.05)
    return {"TTFT": _p95([ttft for ttft, _ in shorts]), "TPOT": _p95([tpot for _, tpot in shorts])}


async def squeeze(server: Served) -> str:
    """Fill-and-Squeeze: outputs that fill the pool, and short requests between them that force preemptions."""
    async with client(server.url) as http:

        async def keep_on(**body: Any) -> None:
            while True:
                reply = await http.post(
                    "/v1/completions",
                    json={"prompt": unique(20), "ignore_eos": True, **body},
                    headers={"x-api-key": ATTACKER},
                )
                reply.raise_for_status()

        await _all(http, VICTIM)
        alone = await _all(http, VICTIM)
        attack = [asyncio.create_task(keep_on(max_tokens=1000)) for _ in range(60)]
        attack += [asyncio.create_task(keep_on(max_tokens=8)) for _ in range(20)]
        await asyncio.sleep(3.0)
        before = server.metric("quire_preemptions_total")
        beside = await _all(http, VICTIM)
        preempted = server.metric("quire_preemptions_total") - before
        for task in attack:
            task.cancel()
        await asyncio.gather(*attack, return_exceptions=True)
    figures = ", ".join(
        f"{name} p95 {alone[name] * 1000:.1f} ms alone, {beside[name] * 1000:.1f} ms beside it" for name in alone
    )
    figures += f"; {preempted:.0f} preemptions"
    # A token of a full batch takes the time of its step, whoever else is in it: TPOT is printed without a limit.
    assert beside["TTFT"] <= MOST_RATIO * alone["TTFT"], figures
    return figures


async def thrash(server: Served, *, alike: bool) -> str:
    """Seventy-four requests of 20 + 1,200 tokens on a pool that holds one and a half of them."""
    prompts = [unique(20)] * THRASHING if alike else [unique(20) for _ in range(THRASHING)]
    async with client(server.url) as http:

        async def ask(prompt: list[int]) -> str:
            body = {"prompt": prompt, "max_tokens": 1200, "temperature": 0, "ignore_eos": True}
            reply = await http.post("/v1/completions", json=body)
            reply.raise_for_status()
            return str(reply.json()["choices"][0]["text"])

        started = time.perf_counter()
        texts = await asyncio.gather(*map(ask, prompts))
        seconds = time.perf_counter() - started
    preempted, again = (server.metric(f"quire_{name}_total") for name in ("preemptions", "recomputed_tokens"))
    computed = THRASHING * 1220 + again
    figures = (
        f"{THRASHING * 1200 / seconds:,.0f} tokens/s, {preempted / THRASHING:.2f} preemptions a request,"
        f" {again / computed:.1%} of the computed tokens computed again"
    )
    assert not alike or len(set(texts)) == 1, "equal requests have different texts"
    assert preempted <= PREEMPTIONS_EACH * THRASHING, figures
    assert again <= (RECOMPUTED if alike else RECOMPUTED_APART) * computed, figures
    return figures


async def behind(server: Served) -> str:
    """Short prompts behind forty long ones, without keys: their first tokens, and the time that the long ones lose."""
    async with client(server.url) as http:

        async def long_ones() -> float:
            async def ask() -> None:
                body = {"prompt": unique(1900), "max_tokens": 100, "ignore_eos": True}
                (await http.post("/v1/completions", json=body)).raise_for_status()

            started = time.perf_counter()
            await asyncio.gather(*(ask() for _ in range(40)))
            return time.perf_counter() - started

        await long_ones()
        alone = await long_ones()
        task, ttfts = asyncio.create_task(long_ones()), []
        await asyncio.sleep(0.05)
        while not task.done() and len(ttfts) < TURNS:
            ttfts.append((await _short(http))[0])
            await asyncio.sleep(0.05)
        beside = await task
    figures = (
        f"TTFT p95 of {len(ttfts)} short ones {_p95(ttfts) * 1000:.0f} ms;"
        f" the long ones take {alone:.2f} s alone, {beside:.2f} s beside them"
    )
    assert _p95(ttfts) <= MOST_WAIT, figures
    assert beside <= MOST_LONGER * alone, figures
    return figures


ROWS = (
    Row(name="tenants-squeeze", what="Fill-and-Squeeze", act=squeeze, flags=(*KEYS, "--kv-memory", "24MiB")),
    *(
        Row(
            name=f"thrash-{'alike' if alike else 'apart'}",
            what=f"long outputs on a small pool, {'equal' if alike else 'different'} prompts",
            act=partial(thrash, alike=alike),
            flags=("--kv-memory", "6MiB"),
        )
        for alike in (True, False)
    ),
    Row(name="short-behind-long", what="short prompts behind forty long ones", act=behind),
)
