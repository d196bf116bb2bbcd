"""Many requests at once: a probe is answered before the work on those before it, and each of them is served."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_server.http import listener
from quire_server.http.listener import Listening
from support.fakes import listening, make_app

pytestmark = pytest.mark.anyio

MANY = 100
SOON = 20  # requests at most that a probe finds under way, each of which takes some turns of the loop
PROBE = "/health/live"
GET = f"GET {PROBE} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
BODY = json.dumps({"prompt": "abc", "max_tokens": 1}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)


@dataclass
class Burst:
    """A server, and clients of it that are so quick that it has a turn only when all have sent what they send."""

    server: Listening | None = None
    replies: list[str] = field(default_factory=list)  # the paths of requests, in the order of their replies
    heads: int = 0  # requests that have begun
    bodies: int = 0  # those that have been parsed
    before_probe: int = 0  # how many of them before the probe's reply

    def open(self, count: int) -> list[socket.socket]:
        assert self.server is not None
        assert self.server.port
        return [socket.create_connection(("127.0.0.1", self.server.port)) for _ in range(count)]

    async def ended(self, *clients: socket.socket) -> list[bytes]:
        """The status lines of the replies."""
        return await asyncio.gather(*(_status(each) for each in clients))

    async def greet(self, clients: list[socket.socket]) -> None:
        """Have a reply to each, whose connection stays open."""
        for client in clients:
            client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await self.begun(len(clients))
        for client in clients:
            client.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        self.replies.clear()

    async def begun(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.heads < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def _status(client: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        return (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n")[0]
    finally:
        writer.close()


@asynccontextmanager
async def burst(app: FastAPI) -> AsyncIterator[Burst]:
    one = Burst()

    def watched(inner: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def told(message: Message) -> None:
                if message["type"] == "http.response.start":
                    one.replies.append(scope["path"])
                    if scope["path"] == PROBE:
                        one.before_probe = one.bodies
                await send(message)

            one.heads += scope["type"] == "http"
            await inner(scope, receive, told)

        return answer

    async def read(*arguments: Any) -> Any:
        body = await reader.read(*arguments)
        one.bodies += 1
        return body

    reader, app.state.bodies = app.state.bodies, SimpleNamespace(read=read)
    app.add_middleware(watched)
    async with listening(app) as server:
        one.server = server
        yield one


def app_for_many(**options: object) -> FastAPI:
    return make_app(max_queued_sequences=2 * MANY, **options)


def check(one: Burst, statuses: list[bytes]) -> None:
    """All are answered, and the probe is one of the first."""
    assert set(statuses) == {b"HTTP/1.1 200 OK"}
    assert (len(one.replies), one.bodies) == (MANY + 1, MANY)
    assert one.before_probe < SOON


async def test_a_probe_on_a_connection_behind_many() -> None:
    async with burst(app_for_many()) as one:
        clients = one.open(MANY + 1)
        for client in clients[:-1]:
            client.sendall(HEAD + BODY)
        clients[-1].sendall(GET)
        check(one, await one.ended(*clients))


async def test_a_probe_on_a_kept_connection_beside_many() -> None:
    async with burst(app_for_many()) as one:
        clients = one.open(MANY + 1)
        await one.greet(clients)
        for client in clients[:-1]:
            client.sendall(HEAD + BODY)
        clients[-1].sendall(GET)
        check(one, await one.ended(*clients))


async def test_a_probe_behind_many_bodies_that_come_at_once() -> None:
    async with burst(app_for_many()) as one:
        clients = one.open(MANY + 1)
        for client in clients[:-1]:
            client.sendall(HEAD)
        await one.begun(MANY)
        for client in clients[:-1]:
            client.sendall(BODY)
        clients[-1].sendall(GET)
        check(one, await one.ended(*clients))


async def test_more_than_may_wait_here_wait_in_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "allow_connections", lambda _: 3)
    async with burst(app_for_many()) as one:
        clients = one.open(20)
        for client in clients:
            client.sendall(HEAD + BODY)
        assert set(await one.ended(*clients)) == {b"HTTP/1.1 200 OK"}


async def test_a_client_that_leaves_while_it_waits_costs_nobody_a_reply() -> None:
    async with burst(app_for_many()) as one:
        leaving, staying = one.open(10), one.open(10)
        for client in (*leaving, *staying):
            client.sendall(HEAD + BODY)
        for client in leaving:
            client.close()
        assert set(await one.ended(*staying)) == {b"HTTP/1.1 200 OK"}
