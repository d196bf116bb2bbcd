"""Clients that ask for whole replies of all sizes, and leave: while they send, are tokenized, wait or are computed."""

from __future__ import annotations

import asyncio
import random
import re
import time
from datetime import datetime

from e2e.served import Served
from hostile.http_bytes import connect, post
from hostile.row import Row

NUM_REQUESTS = 200
SECONDS = 5.0  # in which all of them come and go
MOST_SECONDS = 2.0  # until nothing of them is left
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def draw(dice: random.Random, url: str, number: int) -> bytes:
    """A request that takes long, of any kind and size; every tenth is not sent whole."""
    words = " ".join(str(dice.randint(0, 999)) for _ in range(dice.choice([1, 20, 200, 400, 400, 250_000])))
    common = {"max_tokens": 400, "temperature": 1.0, "seed": number}
    kind = dice.randrange(3)
    if kind == 0:
        body, path = common | {"prompt": words, "ignore_eos": True, "truncate_prompt_tokens": 1000}, "/v1/completions"
    else:
        cut = words[: dice.choice([10, 100, 1000, 2500])]
        body, path = (
            common | {"messages": [{"role": "user", "content": cut}], "ignore_eos": True},
            "/v1/chat/completions",
        )
        if kind == 2:
            schema = SCHEMA | {"title": f"s{dice.randint(0, 30)}"}
            body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    raw = post(url, path, body, headers=f"X-Request-Id: gone-{number}\r\n")
    return raw[: len(raw) // 2] if dice.random() < 0.1 else raw


async def drop(url: str, message: bytes, dice: random.Random) -> float:
    """When its client had gone, seconds since the epoch."""
    begins = dice.uniform(0, SECONDS / 2)
    await asyncio.sleep(begins)
    sock = await connect(url)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(dice.uniform(0.0, SECONDS - begins)):
            await loop.sock_sendall(sock, message)
            await asyncio.sleep(60)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        sock.close()
    return time.time()


def taken_up(log: str) -> dict[int, float]:
    """When each was handed to the engine, by the server's log."""
    lines = re.findall(r"^(\S+ \S+) INFO quire\.requests: .*\[gone-(\d+)\]$", log, re.MULTILINE)
    return {int(number): datetime.strptime(at, "%Y-%m-%d %H:%M:%S.%f").timestamp() for at, number in lines}


def live(server: Served) -> tuple[float, float]:
    """Sequences that run and that wait."""
    return server.metric("quire_requests_running"), server.metric("quire_requests_waiting")


async def act(server: Served) -> str:
    dice = random.Random(7)
    drops = [drop(server.url, draw(dice, server.url, i), random.Random(i)) for i in range(NUM_REQUESTS)]
    left = await asyncio.gather(*drops)
    ended = time.monotonic()
    first = live(server)
    steps = server.metric("quire_engine_steps_total")
    until = time.monotonic()  # the server had something else to do before it answered that
    while (now := time.monotonic()) < ended + 30:
        if any(live(server)):
            until = now
        elif now > until + 1.5:  # nothing has come for so long
            break
        await asyncio.sleep(0.02)
    seconds = until - ended
    entered = taken_up(server.log())
    late = sorted(at - left[number] for number, at in entered.items() if at > left[number])
    told = (
        f"{len(entered)} reached the engine, {len(late)} of them after their clients had left, the last"
        f" {late[-1] if late else 0.0:.2f} s after; when all had left {first[0]:.0f} ran and {first[1]:.0f} waited;"
        f" {seconds:.2f} s and {server.metric('quire_engine_steps_total') - steps:.0f} steps later nothing was left"
    )
    server.wait_idle()
    assert seconds <= MOST_SECONDS, told
    return told


ROWS = (
    Row(
        name="clients-gone",
        what=f"{NUM_REQUESTS} requests for whole replies, of mixed sizes, dropped within {SECONDS:g} s",
        act=act,
        flags=("--max-num-seqs", "8", "--max-num-queued-reqs", "256", "--enable-log-requests"),
    ),
)
