"""Requests that crash the engine or make a step raise, seen from those who share the server with them.

Promises: the faults are tied to requests by their seed, so that nobody else has them. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from e2e.served import Served
from e2e.streams import Streamed, client, gather, stream
from hostile.row import Row

SEED = 666
CRASHES = "--set", f"enable_fault_injection=engine.exit@seed={SEED}", "--max-num-seqs", "16", "--kv-memory", "64MiB"
RAISES = "--set", f"enable_fault_injection=step.raise@seed={SEED}", "--max-num-seqs", "16", "--kv-memory", "64MiB"
SPOILS = "--set", f"enable_fault_injection=step.nan@seed={SEED}", "--max-num-seqs", "16", "--kv-memory", "64MiB"
SHORTAGES = ",".join(f"{point}@{3 * k + i}" for k in range(1, 51) for i, point in enumerate(("oom", "alloc.fail")))
STARVES = "--set", f"enable_fault_injection={SHORTAGES}", "--max-num-seqs", "16", "--kv-memory", "64MiB"
REPEATS, VARIANTS = 10, 10


def _body(prompt: str, max_tokens: int = 200, **more: Any) -> dict[str, Any]:
    return {
        "model": "quire-demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def _others(count: int = 8, max_tokens: int = 200) -> list[dict[str, Any]]:
    return [_body(f"Story number {i} begins on a", max_tokens) for i in range(count)]


async def _golden(http: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[list[int]]:
    alone: list[Streamed] = [await stream(http, body) for body in bodies]
    assert all(len(each.token_ids) == body["max_tokens"] for each, body in zip(alone, bodies, strict=True))
    return [each.token_ids for each in alone]


def _all_as(golden: list[list[int]], got: list[Streamed]) -> None:
    assert [each.errors for each in got] == [[]] * len(got), "somebody else got an error"
    assert [each.token_ids for each in got] == golden, "somebody else got other tokens"


async def sent_again(server: Served) -> str:
    """The same crashing request again and again, then ones that differ in their last token; streams beside them."""
    statuses: list[int] = []
    async with client(server.url) as http:
        bodies = _others(4, 400)
        golden = await _golden(http, bodies)
        started, over, rounds = time.monotonic(), asyncio.Event(), 0

        async def beside() -> None:
            nonlocal rounds
            while not over.is_set():
                _all_as(golden, await gather(len(bodies), lambda i: stream(http, bodies[i])))
                rounds += 1

        task = asyncio.create_task(beside())
        for number in range(REPEATS + VARIANTS):
            prompt = "Crash now" if number < REPEATS else f"Crash now {number}"
            reply = await http.post("/v1/completions", json=_body(prompt, 20, seed=SEED))
            statuses.append(reply.status_code)
            code = reply.json()["error"]["code"]
            assert (reply.status_code, code) in {(500, "engine_error"), (400, "request_quarantined")}, reply.text
            assert reply.headers["x-should-retry"] == "false"
            await asyncio.sleep(0.2)
        over.set()
        await task
        seconds = time.monotonic() - started
    assert statuses == [500] + [400] * (REPEATS - 1) + [500] * VARIANTS, statuses
    server.wait_idle(10)
    restarts = server.metric("quire_engine_restarts_total")
    assert server.process.poll() is None
    return (
        f"the same one {REPEATS} times: {statuses.count(400)} x 400; {VARIANTS} others: 500 each; {restarts:.0f} engine"
        f" restarts in {seconds:.0f} s; {rounds} rounds of {len(bodies)} streams beside identical; the server lives"
    )


async def raising(server: Served) -> str:
    """One request makes every step raise that it is a part of; eight others run."""
    async with client(server.url) as http:
        bodies = _others()
        golden = await _golden(http, bodies)
        task = asyncio.create_task(gather(len(bodies), lambda i: stream(http, bodies[i])))
        await asyncio.sleep(0.3)
        bad = _body("This one raises", 20, seed=SEED)
        first = await http.post("/v1/completions", json=bad)
        again = await http.post("/v1/completions", json=bad)
        _all_as(golden, await task)
    assert first.status_code == 500, first.text
    assert first.headers["x-should-retry"] == "false"
    assert (again.status_code, again.json()["error"]["code"]) == (400, "request_quarantined"), again.text
    server.wait_idle()
    restarts = server.metric("quire_engine_restarts_total")
    assert restarts == 0
    return f"500, x-should-retry false; sent again 400; {len(bodies)} others identical; {restarts:.0f} restarts"


async def spoiled(server: Served) -> str:
    """What one request has in its blocks turns into no numbers; later another has the same prompt."""
    async with client(server.url) as http:
        bodies = _others()
        golden = await _golden(http, bodies)
        prompt = "A long prompt that fills some blocks of the cache, " * 8
        (wanted,) = await _golden(http, [_body(prompt + "once.", 60, cache_salt="golden")])
        task = asyncio.create_task(gather(len(bodies), lambda i: stream(http, bodies[i])))
        await asyncio.sleep(0.3)
        bad = await http.post("/v1/completions", json=_body(prompt + "once.", 60, seed=SEED))
        later = await gather(3, lambda _: stream(http, _body(prompt + "once.", 60)))
        _all_as(golden, await task)
        _all_as([wanted] * 3, later)
    assert bad.status_code == 500, bad.text
    assert "non-finite" in bad.json()["error"]["message"]
    server.wait_idle()
    return f"it ends with 500, {len(bodies)} others identical, its prompt computed again: identical 3 times"


async def starved(server: Served) -> str:
    """A hundred steps for which there is no memory, of the device and of the host in turns."""
    async with client(server.url) as http:
        bodies = _others()
        rounds = 0
        first: list[list[int]] | None = None
        while rounds < 3:
            got = await gather(len(bodies), lambda i: stream(http, bodies[i]))
            first = first or [each.token_ids for each in got]
            _all_as(first, got)
            rounds += 1
        _all_as(await _golden(http, bodies), got)
    server.wait_idle()
    preempted = server.metric("quire_preemptions_total")
    restarts = server.metric("quire_engine_restarts_total")
    warnings = server.log().count("does not fit the memory")
    assert warnings >= 100, f"only {warnings} shortages came"
    assert restarts == 0
    return (
        f"{warnings} shortages, 0 requests failed, {preempted:.0f} preemptions, {restarts:.0f} restarts, all identical"
    )


ROWS = (
    Row(
        name="crash-again",
        what="a request that crashes the engine, sent again and again",
        act=sent_again,
        flags=CRASHES,
    ),
    Row(name="step-raises", what="a request that makes steps raise", act=raising, flags=RAISES),
    Row(name="step-nan", what="blocks that hold no numbers any more", act=spoiled, flags=SPOILS),
    Row(name="no-memory", what="steps without memory, a hundred times", act=starved, flags=STARVES),
)
