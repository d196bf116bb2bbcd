"""All processes of a server stopped and continued, as a paused container is: nobody may be blamed for the silence."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from functools import partial

import psutil

from e2e.served import Served
from e2e.streams import Streamed, client, stream
from hostile.http_bytes import address
from hostile.row import Row

STREAMS = 8
TOKENS = 1500
BEFORE = 1.5  # seconds from the first request to the pause
MOMENTS = 0.4, 0.9  # shares of the pause after which clients go on
SETTLE_SECONDS = 4.0  # after a pause; a watcher that blames others does so by then
LIMITS = "header_timeout=5,body_timeout=8"
FLAGS = ("--max-num-seqs", "16", "--kv-memory", "128MiB", "--timeout-keep-alive", "5")
BODY = json.dumps({"prompt": "a" * 400, "max_tokens": 4, "temperature": 0}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)


def processes(server: Served) -> list[psutil.Process]:
    """The main process first."""
    main = psutil.Process(server.process.pid)
    return [main, *main.children(recursive=True)]


async def paused(server: Served, seconds: float, *, main_first: bool) -> int:
    """Stop all processes for a while; how many of them still run some seconds later."""
    all_of_them = processes(server)
    for each in all_of_them:
        each.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        for each in all_of_them if main_first else reversed(all_of_them):
            each.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.01)  # they do not go on at once
    await asyncio.sleep(SETTLE_SECONDS)
    return sum(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in all_of_them)


async def in_parts(server: Served, parts: tuple[bytes, ...], *moments: float) -> int:
    """A request that comes in parts, each but the first after a moment; the status of its reply, 0 for none."""
    reader, writer = await asyncio.open_connection(*address(server.url))
    started = time.monotonic()
    try:
        for part, moment in zip(parts, (0.0, *moments), strict=True):
            await asyncio.sleep(max(0.0, started + moment - time.monotonic()))
            writer.write(part)
            await writer.drain()
        return int((await asyncio.wait_for(reader.readline(), 60)).split()[1])
    except (OSError, IndexError):
        return 0
    finally:
        writer.close()


async def kept_alive(server: Served, moment: float) -> int:
    """A second request on a connection, sent in the pause; the status of its reply."""
    reader, writer = await asyncio.open_connection(*address(server.url))
    try:
        for _ in range(2):
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            await asyncio.sleep(moment)
        return int(head.split()[1])
    except (OSError, EOFError, IndexError):
        return 0
    finally:
        writer.close()


def careful_clients(server: Served, seconds: float) -> dict[str, asyncio.Task[int]]:
    """Clients that begin before the pause and go on within it, by what they are; their statuses."""
    early, late = (BEFORE + share * seconds for share in MOMENTS)
    half = len(BODY) // 2
    made = {
        "head in two parts": in_parts(server, (HEAD[:40], HEAD[40:] + BODY), early),
        "body in three parts": in_parts(server, (HEAD, BODY[:half], BODY[half:]), early, late),
        "body that ends after it": in_parts(server, (HEAD + BODY[:half], BODY[half:]), BEFORE + seconds + 1),
        "connection without a word": in_parts(server, (b"", HEAD + BODY), early),
        "connection kept alive": kept_alive(server, early),
    }
    return {name: asyncio.create_task(client) for name, client in made.items()}


async def machine(server: Served, seconds: float) -> str:
    """Pause twice, under streams and beside clients whose parts come in the pause."""
    body = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    whole = found = left = count = 0
    lost: list[str] = []
    async with client(server.url) as http:
        for main_first in (True, False):
            streams = [asyncio.create_task(stream(http, body | {"prompt": f"Number {i}"})) for i in range(STREAMS)]
            await asyncio.sleep(0.5)
            others = careful_clients(server, seconds)
            await asyncio.sleep(BEFORE)
            count += len(processes(server))
            left += await paused(server, seconds, main_first=main_first)
            for each in await asyncio.gather(*streams, return_exceptions=True):
                is_whole = isinstance(each, Streamed) and each.done and len(each.token_ids) == TOKENS
                whole += is_whole and not each.errors
            statuses = {name: await other for name, other in others.items()}
            found += len(statuses)
            lost += [f"{name} ({status})" for name, status in statuses.items() if status != 200]
    said = (
        f"{whole} of {2 * STREAMS} streams whole, {found - len(lost)} of {found} other clients answered,"
        f" {left} of {count} processes went on"
    )
    assert (whole, lost, left) == (2 * STREAMS, [], count), f"{said}; lost: {', '.join(lost) or 'none'}"
    return said


ROWS = tuple(
    Row(
        name=f"paused-{seconds}-{servers}",
        what=f"all processes of a server with {servers} API servers stopped for {seconds} s, twice",
        act=partial(machine, seconds=seconds),
        flags=(*FLAGS, "--api-server-count", str(servers)),
        limits=LIMITS,
    )
    for seconds in (14, 25)
    for servers in (1, 2)
)
