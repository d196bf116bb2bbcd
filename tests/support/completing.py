"""Completions asked of the app with a fake engine, checked against the reply's model."""

from __future__ import annotations

import httpx

from quire_server.dialects.completions.wire import CompletionResponse
from support.fake_engine import REPLY, FakeEngine
from support.fakes import connect, make_app

GREEDY = {"model": "fake", "prompt": "hello", "temperature": 0}
FOX = REPLY.decode()


async def complete(client: httpx.AsyncClient, **fields: object) -> dict:
    reply = await client.post("/v1/completions", json=GREEDY | fields)
    assert reply.status_code == 200, reply.text
    CompletionResponse.model_validate_json(reply.content, strict=True)
    return reply.json()


async def run(engine: FakeEngine | None = None, settings: dict | None = None, **fields: object) -> dict:
    async with connect(make_app(engine=engine, **(settings or {}))) as client:
        return await complete(client, **fields)


def script(text: str | bytes, *ends: int) -> FakeEngine:
    """An engine whose every choice is this text."""
    raw = text.encode() if isinstance(text, str) else text
    return FakeEngine(replies=lambda request, choice: (*raw, *ends))
