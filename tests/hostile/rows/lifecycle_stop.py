"""SIGTERM under load: what becomes of running, waiting and streamed work, and how long the server takes to go.

Promises: every client is accounted for. Must not know: how the server stops.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from e2e.served import Served
from hostile.row import Row

EXIT_SECONDS = 5.0  # beyond the drain


@dataclass(slots=True)
class Client:
    """One request over a socket of its own, read to its end."""

    stream: bool
    raw: bytes = b""
    ended: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ending(self) -> str:
        """In a word: what a client makes of it."""
        if not self.raw:
            return "nothing"
        status = int(self.raw.split(b" ", 2)[1])
        if status != 200:
            return str(status)
        if not self.stream:
            return "whole" if b'"finish_reason"' in self.raw else "cut"
        events = [line[6:] for line in self.raw.split(b"\n") if line.startswith(b"data: ")]
        if not events or events[-1].strip() != b"[DONE]":
            return "cut"
        return "event" if "error" in json.loads(events[-2]) else "whole"


async def ask(server: Served, client: Client, max_tokens: int) -> None:
    parts = urlsplit(server.url)
    body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": client.stream, "temperature": 0}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + data)
    try:
        while chunk := await reader.read(65536):
            client.raw += chunk
            if b"data: " in client.raw:
                client.begun.set()
    except ConnectionError:
        pass
    client.ended = time.monotonic()
    client.begun.set()
    writer.close()


async def status(server: Served, path: str, method: str = "GET") -> str:
    """Of one request on a connection of its own; "refused" where nobody listens."""
    parts = urlsplit(server.url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b'Content-Length: 14\r\nConnection: close\r\n\r\n{"prompt":"a"}')
        raw = await reader.read(65536)
        writer.close()
    except ConnectionError:
        return "refused"
    return raw.split(b" ", 2)[1].decode() if raw else "nothing"


async def stop(server: Served, clients: list[Client], *, drain: float, again_after: float | None = None) -> str:
    """Send SIGTERM, and a second one if asked for; count the endings."""
    process = psutil.Process(server.process.pid)
    children = process.children(recursive=True)
    signalled = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    ready, new = await status(server, "/health/ready"), await status(server, "/v1/completions", "POST")
    if again_after is not None:
        await asyncio.sleep(max(0.0, again_after - 0.3))
        server.process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(server.process.wait, 60)
    took = time.monotonic() - signalled
    _, alive = psutil.wait_procs(children, timeout=3)
    endings: dict[str, int] = {}
    for client in clients:
        endings[client.ending] = endings.get(client.ending, 0) + 1
    told = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    what = f"{told}; ready {ready}, new work {new}; exit {code} after {took:.1f} s, {len(alive)} processes left"
    allowed = drain if again_after is None else again_after
    assert set(endings) <= {"event", "503", "whole"}, what
    assert (ready, new) == ("503", "503"), what
    assert code == 0, what
    assert took <= allowed + EXIT_SECONDS, what
    assert not alive, what
    return what


async def forty(server: Served, *, again_after: float | None, drain: float) -> str:
    """40 streams, 8 of which run; one in four of the waiting is not streamed."""
    clients = [Client(stream=i % 5 != 4) for i in range(40)]
    asking = [asyncio.create_task(ask(server, client, 1900)) for client in clients]
    while server.metric("quire_requests_running") < 8 or server.metric("quire_requests_waiting") < 32:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await clients[0].begun.wait()
    told = await stop(server, clients, drain=drain, again_after=again_after)
    await asyncio.gather(*asking)
    return told


async def too_long(server: Served) -> str:
    return await forty(server, again_after=None, drain=1.0)


async def all_begun(server: Served) -> str:
    """40 streams that have all begun."""
    clients = [Client(stream=True) for _ in range(40)]
    asking = [asyncio.create_task(ask(server, client, 1900)) for client in clients]
    for client in clients:
        await client.begun.wait()
    told = await stop(server, clients, drain=1.0)
    await asyncio.gather(*asking)
    assert {client.ending for client in clients} == {"event"}, told
    return told


async def twice(server: Served) -> str:
    return await forty(server, again_after=0.6, drain=60.0)


async def in_time(server: Served) -> str:
    """8 running and 8 queued that all fit into the drain."""
    clients = [Client(stream=i % 2 == 0) for i in range(16)]
    asking = [asyncio.create_task(ask(server, client, 600)) for client in clients]
    while server.metric("quire_requests_running") < 8 or server.metric("quire_requests_waiting") < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    told = await stop(server, clients, drain=60.0)
    await asyncio.gather(*asking)
    assert {client.ending for client in clients} == {"whole"}, told
    return told


FLAGS = ("--max-num-seqs", "8", "--kv-memory", "64MiB")
ROWS = (
    Row(
        name="sigterm-too-much-work",
        what="SIGTERM, 40 requests, a drain of 1 s",
        act=too_long,
        flags=(*FLAGS, "--drain-timeout", "1"),
    ),
    Row(
        name="sigterm-40-streams",
        what="SIGTERM, 40 streams that have begun, a drain of 1 s",
        act=all_begun,
        flags=("--max-num-seqs", "40", "--kv-memory", "512MiB", "--drain-timeout", "1"),
    ),
    Row(name="sigterm-twice", what="SIGTERM twice, 40 requests", act=twice, flags=(*FLAGS, "--drain-timeout", "60")),
    Row(
        name="sigterm-in-time",
        what="SIGTERM, 8 running and 8 queued",
        act=in_time,
        flags=(*FLAGS, "--drain-timeout", "60"),
    ),
)
