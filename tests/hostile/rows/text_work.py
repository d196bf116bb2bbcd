"""Long texts: tokenized, made text again, rendered as conversations; and those of clients that do not wait for it."""

from __future__ import annotations

import asyncio
import json
import time

import httpx

from e2e.served import Served
from hostile.row import Row
from hostile.watch import Seen, Watch

SECONDS = 120.0
HELD = 0.1  # seconds that the event loop may be held
SILENT = 0.25  # seconds beyond the usual that another's stream may be silent
GROWN = 64 << 20  # bytes by which the process may be larger some seconds after
BODY = 64 << 20
_REST = 6.0  # seconds in which memory is given back
_ANY_BODY = ("--max-body-bytes", "64MiB")


async def post(url: str, path: str, body: bytes) -> tuple[int, int, float]:
    """The status, the length of the reply and the seconds that it took."""
    started, size = time.perf_counter(), 0
    headers = {"content-type": "application/json"}
    async with (
        httpx.AsyncClient(base_url=url, timeout=SECONDS) as client,
        client.stream("POST", path, content=body, headers=headers) as reply,
    ):
        async for piece in reply.aiter_raw():
            size += len(piece)
    return reply.status_code, size, time.perf_counter() - started


async def judged(watch: Watch, happened: str, usual: float = 0.0) -> str:
    """What happened and what others felt of it. Raises AssertionError where that is more than is promised.

    `usual`: seconds for which another's stream is silent anyway beside such a request.
    """
    felt = await watch.seen()
    await asyncio.sleep(_REST)
    after = await watch.seen()
    told = f"{happened}; {felt}; {_REST:g} s later {after.grown / 2**20:+.0f} MiB"
    faults = [*_broken(felt, after, usual), *await watch.canary()]
    assert not faults, f"{told}: {'; '.join(faults)}"
    return told


def _broken(felt: Seen, after: Seen, usual: float) -> list[str]:
    promises = {
        "the event loop was held": felt.stall <= HELD,
        "another's stream was silent": felt.beyond <= SILENT + usual,
        "another's stream broke or changed": not (felt.broken or felt.changed),
        "memory is kept": after.grown <= GROWN,
    }
    return [name for name, kept in promises.items() if not kept]


async def _one(server: Served, path: str, body: bytes) -> str:
    async with Watch(server.url, pid=server.process.pid) as watch:
        status, size, seconds = await post(server.url, path, body)
        return await judged(watch, f"{len(body) >> 10} KiB, answered {status} with {size >> 10} KiB in {seconds:.1f} s")


async def tokenize(server: Served) -> str:
    return await _one(
        server, "/tokenize", json.dumps({"prompt": "one tale of seven words, and more. " * 240_000}).encode()
    )


async def tokenize_letters(server: Served) -> str:
    """Few of these characters are in a token together."""
    return await _one(server, "/tokenize", json.dumps({"prompt": "zq7~" * (2 << 20)}, ensure_ascii=False).encode())


async def detokenize(server: Served) -> str:
    return await _one(server, "/detokenize", b'{"tokens":[' + b"17,9," * 2_000_000 + b"3]}")


async def completion(server: Served) -> str:
    """Far more than the context: refused by its length."""
    return await _one(server, "/v1/completions", json.dumps({"prompt": "a tale " * (1 << 20)}).encode())


async def parts(server: Served) -> str:
    part = {"type": "text", "text": "x"}
    messages = [{"role": "user", "content": [part] * 200}] * 4096
    return await _one(server, "/v1/chat/completions", json.dumps({"messages": messages}).encode())


async def left(server: Served) -> str:
    """24 clients send 8 MiB to be tokenized and leave; then one comes with 4,800 characters."""
    body = json.dumps({"prompt": "one tale of seven words, and more. " * 240_000}).encode()
    async with Watch(server.url, pid=server.process.pid) as watch:
        senders = [asyncio.create_task(post(server.url, "/tokenize", body)) for _ in range(24)]
        await asyncio.sleep(10.0)  # for all of them to be read
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        short = json.dumps({"prompt": "a tale " * 686}).encode()
        status, _, seconds = await post(server.url, "/tokenize", short)
        told = await judged(watch, f"the short text was answered {status} in {seconds:.2f} s")
        assert status == 200, told
        assert seconds < 1.0, told
        return told


ROWS = [
    Row(name="text-tokenize", what="8 MiB of words to be tokenized", act=tokenize, flags=_ANY_BODY),
    Row(name="text-letters", what="8 MiB of letters to be tokenized", act=tokenize_letters, flags=_ANY_BODY),
    Row(name="text-detokenize", what="4 million ids to be made text", act=detokenize, flags=_ANY_BODY),
    Row(name="text-completion", what="a prompt of 7 MiB", act=completion, flags=_ANY_BODY),
    Row(name="text-parts", what="200 parts in each of 4,096 messages", act=parts, flags=_ANY_BODY),
    Row(name="text-left", what="long texts of clients that leave, a short one behind them", act=left, flags=_ANY_BODY),
]
