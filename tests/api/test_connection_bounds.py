"""What one client may take of the listener: connections of one address."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from quire_server.http import addresses, connection
from support.fakes import exchange, listening, make_app, parse_reply

pytestmark = pytest.mark.anyio


async def test_an_address_has_its_share_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "LOOPBACK", ())
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.1)
    app = make_app(max_connections_per_address=2, header_timeout=5)
    async with listening(app) as server:
        open_ones = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        await asyncio.sleep(0.05)
        reply = parse_reply(await exchange(server.port))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_many_connections")
        for _, writer in open_ones:
            writer.close()
        await asyncio.sleep(0.1)
        async with httpx.AsyncClient(base_url=server.address) as client:
            assert (await client.get("/version")).status_code == 200
