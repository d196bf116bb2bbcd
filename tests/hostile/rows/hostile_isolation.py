"""Clients that try to learn of one another, or to end one another: keys, salts, ids.

Promises: each row's figures are printed, kept or broken. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time

import httpx

from e2e.served import Served
from e2e.streams import client, stream
from hostile.corpus.facts import KEY
from hostile.row import Row

TIMINGS = 2000  # of each wrong key
LEAST_P = 0.01
TRIES = 50
PROMPT_TOKENS = 1500
TWINS = 8
SALT_NOISE = 0.10  # of a cold prompt's time
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


async def key_timing(server: Served) -> str:
    """Whether the time of a refusal tells how much of a key was right: two wrong keys by turns, rank-sum test."""
    first, last = "X" + KEY[1:], KEY[:-1] + "X"
    times: dict[str, list[float]] = {first: [], last: []}
    async with client(server.url) as http:
        for turn in range(2 * TIMINGS + 100):
            key = (first, last)[(turn ^ (turn >> 1)) & 1]  # neither is always the one after the other
            started = time.perf_counter()
            reply = await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            took = time.perf_counter() - started
            assert reply.status_code == 401
            if turn >= 100:
                times[key].append(took)
    p = rank_sum_p(times[first], times[last])
    medians = [statistics.median(each) * 1e6 for each in times.values()]
    assert p > LEAST_P, f"medians {medians[0]:.0f} and {medians[1]:.0f} us, p = {p:.4f}"
    return f"{len(times[first])} each: medians {medians[0]:.0f} and {medians[1]:.0f} us, p = {p:.2f}"


def rank_sum_p(one: list[float], other: list[float]) -> float:
    """Two-sided p of the hypothesis that neither sample tends to be larger (normal approximation)."""
    ranked = sorted([(value, 0) for value in one] + [(value, 1) for value in other])
    rank_sum, start = 0.0, 0
    while start < len(ranked):
        end = start
        while end < len(ranked) and ranked[end][0] == ranked[start][0]:
            end += 1
        mean_rank = (start + 1 + end) / 2
        rank_sum += mean_rank * sum(which == 0 for _, which in ranked[start:end])
        start = end
    mean = len(one) * (len(ranked) + 1) / 2
    deviation = math.sqrt(len(one) * len(other) * (len(ranked) + 1) / 12)
    return math.erfc(abs(rank_sum - mean) / deviation / math.sqrt(2))


async def salts(server: Served) -> str:
    """What one salt has warmed is cold under another, by the usage and by the clock."""

    async def ask(http: httpx.AsyncClient, prompt: list[int], salt: str | None) -> tuple[int, float]:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0} | ({"cache_salt": salt} if salt else {})
        started = time.perf_counter()
        usage = (await http.post("/v1/completions", json=body)).raise_for_status().json()["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0), time.perf_counter() - started

    async with client(server.url) as http:
        shared = [5 + i % 300 for i in range(PROMPT_TOKENS)]
        for _ in range(3):
            cached, _ = await ask(http, shared, "a")
        assert cached > PROMPT_TOKENS // 2, f"the same salt has only {cached} tokens cached"
        for salt in ("b", None):
            cached, _ = await ask(http, shared, salt)
            assert cached == 0, f"salt {salt!r} has {cached} tokens cached of salt 'a'"
        other, cold = [], []
        for turn in range(TRIES):
            other.append((await ask(http, shared, f"other {turn}"))[1])
            cold.append((await ask(http, [400 + turn, *shared[1:]], f"cold {turn}"))[1])
    ratio = statistics.median(other) / statistics.median(cold)
    figures = f"{statistics.median(other) * 1000:.1f} ms and {statistics.median(cold) * 1000:.1f} ms where nobody was"
    assert abs(ratio - 1) <= SALT_NOISE, figures
    return f"0 tokens cached, median of {TRIES} tries {figures}"


async def twins(server: Served) -> str:
    """Requests of the same ids: each has its own text, and only who leaves is stopped."""
    async with client(server.url) as http:
        bodies = [{"prompt": f"{i}, {i + 1},", "max_tokens": 150, "ignore_eos": True, "seed": i} for i in range(TWINS)]
        alone = [(await stream(http, body)).text for body in bodies]
        for name in ("c", "cmpl", "-", "same"):
            http.headers["X-Request-Id"] = name
            named = [body | {"request_id": name} for body in bodies]
            seen = await asyncio.gather(
                *(stream(http, body, drop_after=5 if i % 2 else None) for i, body in enumerate(named))
            )
            for i, each in enumerate(seen):
                if i % 2 == 0:
                    assert each.text == alone[i], f"{name}: stream {i} has another text"
                    assert each.done, f"{name}: stream {i} was stopped"
    await asyncio.to_thread(server.wait_idle)
    return f"4 names x {TWINS} streams, half of them left: the others are whole and as they are alone"


ROWS = (
    Row(name="key-timing", what="wrong keys", act=key_timing, flags=("--api-key", KEY)),
    Row(name="salts", what="a prompt that another salt has warmed", act=salts),
    Row(name="twins", what="several requests of the same id", act=twins),
)
