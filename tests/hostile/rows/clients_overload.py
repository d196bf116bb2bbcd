"""Four times more load than the server can take, from clients that come again: what is left of its capacity.

The load is made in this process, on the cores that the server has; its share of them is told. Clients that obey come
again when they were told to; stubborn ones after about a second, whatever they were told.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass, field, replace

import psutil

from e2e.served import Served
from hostile.http_bytes import Pool, post
from hostile.row import Row

SECONDS = float(os.environ.get("HOSTILE_OVERLOAD_SECONDS", "30"))
TIMES = 4.0  # as much as capacity
SEATS, QUEUE = 16, 32
LEAST_GOODPUT = 0.9
OUTPUT = (40, 160)  # tokens of an answer


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    finished: int = 0
    tokens: int = 0
    refusals: int = 0
    broken: int = 0
    first_tokens: list[float] = field(default_factory=list)  # seconds, from the request that was accepted
    refusal_seconds: list[float] = field(default_factory=list)


def question(server: Served, dice: random.Random) -> tuple[bytes, int]:
    """And of how many tokens its answer is: of a busy server's events some have several."""
    tokens = dice.randint(*OUTPUT)
    body = {
        "messages": [{"role": "user", "content": f"Tell me story number {dice.randrange(10**9)}, please."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "seed": dice.randrange(2**31),
    }
    return post(server.url, "/v1/chat/completions", body), tokens


async def ask(pool: Pool, asked_for: tuple[bytes, int], tally: Tally) -> float | None:
    """None: answered, or broken; else the seconds after which to come again."""
    message, tokens = asked_for
    exchange = await pool.take()
    asked = time.perf_counter()
    try:
        await exchange.send(message)
    except ConnectionError:
        tally.broken += 1
        return None
    if exchange.status in (429, 503):  # 503: too many connections, of all who come again at once
        tally.refusals += 1
        tally.refusal_seconds.append(time.perf_counter() - asked)
        pool.give(exchange)
        return exchange.retry_seconds
    if exchange.status != 200 or not exchange.is_whole:
        tally.broken += 1
        exchange.close()
        return None
    tally.finished += 1
    tally.tokens += tokens
    tally.first_tokens.append(exchange.first_at - asked)
    pool.give(exchange)
    return None


async def closed_loop(server: Served, seconds: float) -> Tally:
    """As many clients as seats and half a queue, one question after another: always full, and never beyond."""
    pool, tally, end = Pool(server.url), Tally(), time.monotonic() + seconds

    async def client(number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() < end:
            await ask(pool, question(server, dice), tally)

    clients = [asyncio.create_task(client(number)) for number in range(SEATS + QUEUE // 2)]
    await asyncio.sleep(seconds)
    in_time = replace(tally)  # without what is answered after the end
    await asyncio.gather(*clients)
    pool.close()
    return in_time


async def open_loop(server: Served, rate: float, seconds: float, *, stubborn: bool) -> Tally:
    """New clients at a rate, who come again until they are answered or the time is over."""
    pool, tally, dice = Pool(server.url), Tally(), random.Random(1)
    started = time.monotonic()
    end = started + seconds

    async def client(message: tuple[bytes, int]) -> None:
        while time.monotonic() < end:
            wait = await ask(pool, message, tally)
            if wait is None:
                return
            await asyncio.sleep(random.uniform(0.5, 1.5) if stubborn else wait)

    clients = set()
    due = started
    while due < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        clients.add(asyncio.create_task(client(question(server, dice))))
        due += dice.expovariate(rate)
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    in_time = replace(tally)
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    pool.close()
    return in_time


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


class Shares:
    """Of the cores that each process had, over some time."""

    def __init__(self, server: Served) -> None:
        self._processes = {
            "load": psutil.Process(),
            "server": psutil.Process(server.process.pid),
            "engine": psutil.Process(server.engine().pid),
        }
        self._before = self._now()
        self._started = time.monotonic()

    def _now(self) -> dict[str, float]:
        return {name: cpu_seconds(process) for name, process in self._processes.items()}

    def __str__(self) -> str:
        seconds = time.monotonic() - self._started
        each = {name: (now - self._before[name]) / seconds for name, now in self._now().items()}
        return ", ".join(f"{name} {share:.2f}" for name, share in each.items())

    def serving(self) -> float:
        """Seconds of the server and its engine."""
        now = self._now()
        return sum(now[name] - self._before[name] for name in ("server", "engine"))


async def measure(server: Served, *, stubborn: bool) -> str:
    await closed_loop(server, 3.0)  # whatever is done once is done
    shares = Shares(server)
    capacity = await closed_loop(server, SECONDS / 2)
    alone, alone_serving = str(shares), shares.serving()
    whole_rate, token_rate = (count / (SECONDS / 2) for count in (capacity.finished, capacity.tokens))
    shares = Shares(server)
    loaded = await open_loop(server, TIMES * whole_rate, SECONDS, stubborn=stubborn)
    goodput = loaded.tokens / SECONDS / token_rate
    # Who is last in a full queue waits until all before it have ended, at the least rate that is allowed.
    implied = (SEATS + QUEUE) / (LEAST_GOODPUT * whole_rate)
    told = (
        f"capacity {whole_rate:.1f} answers/s, {token_rate:.0f} tokens/s; at {TIMES:g} times that for {SECONDS:g} s"
        f" goodput {goodput:.0%} ({loaded.finished} answers, {loaded.refusals} refusals, {loaded.broken} broken);"
        f" first token of the accepted p50 {quantile(loaded.first_tokens, 0.5):.2f} s,"
        f" p99 {quantile(loaded.first_tokens, 0.99):.2f} s"
        f" (a full queue implies {implied:.2f} s); a refusal took p50 {1e3 * quantile(loaded.refusal_seconds, 0.5):.1f}"
        f" ms; of {os.cpu_count()} cores had {shares} (for capacity {alone}); tokens a second of server and engine"
        f" {(loaded.tokens / shares.serving()) / (capacity.tokens / alone_serving):.0%} of those at capacity"
    )
    assert goodput >= LEAST_GOODPUT, told
    assert quantile(loaded.first_tokens, 0.99) <= implied, told
    assert not loaded.broken, told
    return told


async def obedient_clients(server: Served) -> str:
    return await measure(server, stubborn=False)


async def stubborn_clients(server: Served) -> str:
    return await measure(server, stubborn=True)


FLAGS = ("--max-num-seqs", str(SEATS), "--max-num-queued-reqs", str(QUEUE))
ROWS = (
    Row(
        name="clients-overload",
        what=f"{TIMES:g} times the load it can take for {SECONDS:g} s, from clients that come again when told to",
        act=obedient_clients,
        flags=FLAGS,
    ),
    Row(
        name="clients-stubborn",
        what=f"{TIMES:g} times the load it can take for {SECONDS:g} s, from clients that come again every second",
        act=stubborn_clients,
        flags=FLAGS,
    ),
)
