"""POST /v1/requests/{id}/cancel: who may end a request, by which name, and what its client gets."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.fake_engine import FakeEngine
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio

KEYS = ("first-key", "second-key", "third-key")
ASK = {"prompt": "a", "max_tokens": 50}


def held_engine() -> FakeEngine:
    engine = FakeEngine()
    engine.hold()
    return engine


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(
    client: httpx.AsyncClient, engine: FakeEngine, name: str, key: str, **fields: object
) -> asyncio.Task[httpx.Response]:
    """A completion that has reached the engine."""
    before = len(engine.submitted)
    asking = client.post("/v1/completions", json=ASK | fields, headers={"x-request-id": name, **bearer(key)})
    task = asyncio.create_task(asking)
    async with asyncio.timeout(300):
        while len(engine.submitted) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return task


async def cancel(client: httpx.AsyncClient, name: str, key: str) -> bool:
    reply = await client.post(f"/v1/requests/{name}/cancel", headers=bearer(key))
    answer: dict[str, Any] = reply.json()
    assert (reply.status_code, answer["id"], answer["object"]) == (200, name, "request.cancellation")
    return bool(answer["cancelled"])


async def test_ones_own_request_is_cancelled_once_with_all_its_prompts() -> None:
    engine = held_engine()
    state = make_state(engine=engine, api_key=KEYS)
    async with connect(make_app(state)) as client:
        one = await ask(client, engine, "one", KEYS[0], prompt=["a", "b"], n=2)
        other = await ask(client, engine, "other", KEYS[0])
        assert [await cancel(client, "one", KEYS[0]) for _ in range(3)] == [True, False, False]
        reply = await one
        assert (reply.status_code, reply.json()["error"]["code"]) == (499, "request_cancelled")
        assert reply.headers["x-should-retry"] == "false"
        assert sorted(engine.aborted) == sorted(each.request_id for each in engine.submitted[:2])
        assert state.client.in_flight == 1
        assert await cancel(client, "cmpl-other", KEYS[0])  # by the reply's id
        assert (await other).status_code == 499
        assert not await cancel(client, "nothing", KEYS[0])


async def test_a_stream_ends_with_the_error() -> None:
    engine = FakeEngine(step_seconds=0.001)
    async with connect(make_app(engine=engine)) as client:
        body = ASK | {"stream": True, "max_tokens": 400}
        asking = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "one"}))
        async with asyncio.timeout(300):
            while engine.step_id < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await cancel(client, "one", "none")
        reply = await asking
    *chunks, error, done = [line for line in reply.text.splitlines() if line]
    assert reply.status_code == 200
    assert chunks
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_cancelled"
    assert done == "data: [DONE]"


async def test_nobody_cancels_what_another_has(tmp_path: Path) -> None:
    """Neither by a key, nor as a tenant that shares prefixes with the other; the keys of one tenant are one caller."""
    file = tmp_path / "tenants.yaml"
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in ("t1", "t2", "u1")]
    tenants = [
        {"name": "t", "key_sha256": digests[:2], "prefix_group": "g"},
        {"name": "u", "key_sha256": digests[2], "prefix_group": "g"},
    ]
    file.write_text(yaml.safe_dump({"tenants": tenants}))
    engine = held_engine()
    async with connect(make_app(engine=engine, tenants=file, api_key=KEYS)) as client:
        running = {key: await ask(client, engine, f"of-{key}", key) for key in (KEYS[0], "t1", "u1")}
        for owner, other in ((KEYS[0], KEYS[1]), (KEYS[0], "t1"), ("t1", "u1"), ("u1", "t1"), ("t1", KEYS[0])):
            assert not await cancel(client, f"of-{owner}", other)
        assert engine.aborted == []
        assert (await client.post(f"/v1/requests/of-{KEYS[0]}/cancel")).status_code == 401
        assert await cancel(client, "of-t1", "t2")
        assert (await running["t1"]).status_code == 499
        engine.release()
        for key in (KEYS[0], "u1"):
            assert (await running[key]).status_code == 200
