"""What one client may take of the listener: connections of one address, and the loop's time for parsing."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from quire_server.http import connection
from quire_server.http.connection import Connection
from support.fakes import exchange, listening, make_app, parse_reply

pytestmark = pytest.mark.anyio

CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


async def test_nothing_of_a_body_is_parsed_for_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = 0
    counted = Connection.on_body

    def on_body(self: Connection, piece: bytes) -> None:
        nonlocal chunks
        chunks += 1
        counted(self, piece)

    monkeypatch.setattr(Connection, "on_body", on_body)
    async with listening(make_app(api_key=("key",))) as server:
        tiny = [b"1\r\n[\r\n" * 20_000] * 10
        with contextlib.suppress(ConnectionError):
            raw = await exchange(server.port, CHUNKED, *tiny, pause=0.01)
            assert parse_reply(raw).status_code == 401
    assert chunks < 100_000


async def test_requests_behind_requests_wait_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    heads = Connection.on_headers_complete

    def on_headers_complete(self: Connection) -> None:
        nonlocal longest
        heads(self)
        longest = max(longest, len(self.pipeline))

    monkeypatch.setattr(Connection, "on_headers_complete", on_headers_complete)
    async with listening(make_app()) as server:
        requests = [b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: n%d\r\n\r\n" % i for i in range(600)]
        last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        raw = await exchange(server.port, b"".join(requests) + last)
    ids = [line.split(b": ")[1] for line in raw.split(b"\r\n") if line.startswith(b"x-request-id: n")]
    assert ids == [b"n%d" % i for i in range(600)]
    assert raw.count(b"HTTP/1.1 200 OK") == 601
    assert longest < 150


async def test_an_address_has_its_share_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LOOPBACK", ())
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.1)
    app = make_app(max_connections=4, header_timeout=600)
    async with listening(app) as server:
        open_ones = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        await asyncio.sleep(0.05)
        reply = parse_reply(await exchange(server.port))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_many_connections")
        for _, writer in open_ones:
            writer.close()
        async with httpx.AsyncClient(base_url=server.address) as client, asyncio.timeout(300):
            while (await client.get("/version")).status_code != 200:  # noqa: ASYNC110 - ends are seen, and have lingered
                await asyncio.sleep(0.05)
