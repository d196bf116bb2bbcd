"""A tenant that attacks another through the cache: floods it, or guesses prompts by counts and by times.

Promises: each row's figures are printed, kept or broken; each takes less than a minute. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial

import httpx

from e2e.served import Served
from e2e.streams import client
from hostile.row import Row
from hostile.rows.hostile_isolation import LEAST_P, rank_sum_p
from hostile.two_tenants import ATTACKER, KEYS, VICTIM, dice, unique
from support.dialects import DIALECTS, cached_tokens, request_of

PREFIX = [20 + i * 7 % 300 for i in range(1024)]  # of all of the victim's prompts
TURNS, BURST, FLOOD_TOKENS, AT_ONCE = 40, 24, 512, 8
LEAST_HITS, MOST_TTFT = 0.9, 1.2
GUESSES, LIST = 10_000, 64
COMMON, BLOCK = 48, 16
SAMPLES, ATTEMPTS = 1000, 2


async def _first_token(http: httpx.AsyncClient) -> tuple[float, float]:
    """The victim's next request: the share of its prefix that was cached, and seconds to the first token."""
    body = {"prompt": [*PREFIX, *unique(16)], "max_tokens": 1, "ignore_eos": True}
    started = time.perf_counter()
    reply = await http.post("/v1/completions", json=body, headers={"x-api-key": VICTIM})
    return cached_tokens(reply) / len(PREFIX), time.perf_counter() - started


async def _flood(http: httpx.AsyncClient) -> None:
    body = {"prompt": unique(FLOOD_TOKENS), "max_tokens": 1}
    (await http.post("/v1/completions", json=body, headers={"x-api-key": ATTACKER})).raise_for_status()


async def flood(server: Served) -> str:
    """Unique prompts of one tenant for twice the pool between any two requests of another, then beside them."""
    async with client(server.url) as http:
        await _first_token(http)
        after_burst, undisturbed = [], []
        for _ in range(TURNS):
            await asyncio.gather(*(_flood(http) for _ in range(BURST)))
            after_burst.append(await _first_token(http))
            undisturbed.append(await _first_token(http))

        async def keep_on() -> None:
            while True:
                await _flood(http)

        flooding = [asyncio.create_task(keep_on()) for _ in range(AT_ONCE)]
        await asyncio.sleep(1.0)
        beside = [await _first_token(http) for _ in range(TURNS)]
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    hits, times = (
        {
            name: f([each[i] for each in found])
            for name, found in (("undisturbed", undisturbed), ("between", after_burst), ("beside", beside))
        }
        for i, f in ((0, statistics.mean), (1, statistics.median))
    )
    figures = "; ".join(f"{name}: {hits[name]:.0%} cached, first token {times[name] * 1000:.1f} ms" for name in hits)
    assert min(hits.values()) >= LEAST_HITS * hits["undisturbed"] > 0, figures
    assert times["between"] <= MOST_TTFT * times["undisturbed"], figures
    return figures


async def counts(server: Served) -> str:
    """Ten thousand guesses of four tokens behind a known beginning, half with the victim's salt: each is as cold."""
    common, tail, salt = unique(COMMON), unique(BLOCK - 4 + 1), "of the victim's own"
    codes = [[a, b, c, d] for a in range(20, 30) for b in range(20, 30) for c in range(20, 30) for d in range(20, 30)]
    secret = [*common, *dice.choice(codes), *tail]

    async def ask(http: httpx.AsyncClient, key: str, prompts: list[list[int]], **fields: object) -> int:
        body = {"prompt": prompts, "max_tokens": 1, **fields}
        return cached_tokens(await http.post("/v1/completions", json=body, headers={"x-api-key": key}))

    dice.shuffle(codes)
    told = []
    async with client(server.url) as http:
        for fields in ({}, {"cache_salt": salt}):
            for _ in range(2):
                own = await ask(http, VICTIM, [secret], **fields)
            assert own == COMMON + BLOCK, f"the victim finds {own} tokens of its own prompt"
            await ask(http, ATTACKER, [[*common, 401]], **fields)
        for start in range(0, GUESSES, LIST):
            fields = {"cache_salt": salt} if start // LIST % 2 else {}
            guesses = [[*common, *code, *tail] for code in codes[start : start + LIST]]
            told.append(await ask(http, ATTACKER, guesses, **fields) / len(guesses))
        for fields in ({}, {"cache_salt": salt}):
            own = await ask(http, VICTIM, [secret], **fields)
            assert own == COMMON + BLOCK, f"the victim then finds {own} tokens of its own prompt"
    assert set(told) == {COMMON}, f"guesses were told of {sorted(set(told))} cached tokens each"
    return f"{GUESSES} guesses, {COMMON} cached tokens each, which are the attacker's own; the victim's stay {own}"


async def times(server: Served, *, dialect: str) -> str:
    """By turns a right guess of what the victim has just sent and a wrong one, and the victim's own for comparison."""
    figures = ""
    for _ in range(ATTEMPTS):
        p, figures = await _compared(server, dialect)
        if p > LEAST_P:  # of a hundred attempts one fails by chance, of a leak every one
            return figures
    raise AssertionError(figures)


async def _compared(server: Served, dialect: str) -> tuple[float, str]:
    kinds = {"right": ATTACKER, "wrong": ATTACKER, "its own": VICTIM, "its next": VICTIM}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    cached: dict[str, list[int]] = {kind: [] for kind in kinds}

    def text() -> str:
        return " ".join(f"{dice.randrange(10**4):04d}" for _ in range(16))

    async with client(server.url) as http:
        for turn in range(SAMPLES + 20):
            secret = text()
            await http.post(**request_of(dialect, secret, VICTIM))
            asked = {"right": secret, "wrong": text(), "its own": secret, "its next": text()}
            order = list(kinds)
            if (turn ^ (turn >> 1)) & 1:  # neither guess is always the first
                order[:2] = order[1::-1]
            for kind in order:
                request = request_of(dialect, asked[kind], kinds[kind])
                started = time.perf_counter()
                reply = await http.post(**request)
                took = time.perf_counter() - started
                if turn >= 20:
                    seconds[kind].append(took)
                    cached[kind].append(cached_tokens(reply))
    least = min(cached["its own"])
    assert max(cached["right"]) < least > max(cached["its next"]), f"right guesses: {max(cached['right'])} of {least}"
    p, power = (rank_sum_p(seconds[a], seconds[b]) for a, b in (("right", "wrong"), ("its own", "its next")))
    medians = ", ".join(f"{kind} {statistics.median(values) * 1e3:.2f} ms" for kind, values in seconds.items())
    figures = f"{SAMPLES} each: {medians}; guesses p = {p:.3f}, its own p = {power:.1g}"
    assert power < LEAST_P, f"the comparison sees no cached prefix at all: {figures}"
    return p, figures


async def in_flight(server: Served) -> str:
    """A prompt that is being computed: the attacker's twin of it computes all anew, the victim's own joins it."""
    joined, apart = 0, []
    async with client(server.url) as http:

        async def ask(key: str, prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 1}
            return cached_tokens(await http.post("/v1/completions", json=body, headers={"x-api-key": key}))

        for _ in range(TURNS):
            prompt = unique(1200)
            apart += await asyncio.gather(ask(VICTIM, prompt), ask(ATTACKER, prompt))
            prompt = unique(1200)
            joined += max(await asyncio.gather(ask(VICTIM, prompt), ask(VICTIM, prompt))) > BLOCK
    assert joined == TURNS, f"{joined} of {TURNS} joined within one tenant"
    assert max(apart) == 0, f"another's prompt gave {max(apart)} tokens"
    return f"{TURNS} pairs of one tenant joined, {TURNS} pairs of two did not"


ROWS = (
    Row(name="tenants-flood", what="a flood of unique prompts", act=flood, flags=(*KEYS, "--kv-memory", "16MiB")),
    Row(name="tenants-guesses", what="guesses of another tenant's prompt", act=counts, flags=KEYS),
    Row(name="tenants-in-flight", what="prompts that another tenant is sending", act=in_flight, flags=KEYS),
    *(
        Row(name=f"tenants-{name}", what=f"guesses by time, {name}", act=partial(times, dialect=name), flags=KEYS)
        for name in DIALECTS
    ),
)
