"""Asyncio clients of the completions API, for tests that need many at once, break off or kill the engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from e2e.served import Served


@dataclass
class Streamed:
    """What one client saw of one stream."""

    status: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    headers: dict[str, str] = field(default_factory=dict)


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(120, connect=30), limits=limits)


async def stream(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    *,
    on_chunk: Callable[[Streamed], None] | None = None,
    drop_after: int | None = None,
    headers: dict[str, str] | None = None,
) -> Streamed:
    """One streamed completion; closes the connection after `drop_after` chunks when given."""
    seen, chunks = Streamed(), 0
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=headers) as reply:
        seen.status = reply.status_code
        seen.headers = dict(reply.headers)
        if reply.status_code != 200:
            seen.errors.append(json.loads(await reply.aread())["error"])
            return seen
        if drop_after == 0:
            return seen
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                seen.done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                seen.errors.append(event["error"])
                continue
            for choice in event["choices"]:
                seen.text += choice["text"]
                seen.token_ids += choice.get("token_ids") or []
                seen.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                if choice["finish_reason"]:
                    seen.finish_reasons.append(choice["finish_reason"])
            chunks += 1
            if on_chunk is not None:
                on_chunk(seen)
            if drop_after is not None and chunks >= drop_after:
                return seen
    return seen


async def over_kills(
    server: Served,
    http: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    goals: Iterable[int],
    *,
    of: Callable[[Sequence[int]], int] = min,
    headers: dict[str, str] | None = None,
) -> list[Streamed]:
    """Run all streams at once, and kill the engine each time that the least far of them (`of`) has a goal's tokens."""
    progress = [0] * len(bodies)

    def watch(number: int) -> Callable[[Streamed], None]:
        return lambda seen: progress.__setitem__(number, len(seen.token_ids))

    tasks = [
        asyncio.create_task(stream(http, body, on_chunk=watch(number), headers=headers))
        for number, body in enumerate(bodies)
    ]
    for goal in goals:
        async with asyncio.timeout(300):
            while of(progress) < goal:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        os.kill(server.engine().pid, signal.SIGKILL)
    return await asyncio.gather(*tasks)


async def gather(count: int, make: Callable[[int], Any]) -> list[Any]:
    return await asyncio.gather(*(make(i) for i in range(count)))
