"""Every call of a set of paired ones has the status that vLLM gives it, or another on purpose: the table says which."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from support.fake_engine import FakeEngine
from support.fakes import connect, make_app
from support.vllm_calls import BOTH, LEAST, ROUTES, TEXT, calls

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def client(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(make_app(engine=FakeEngine())) as connected:
        yield connected


@pytest.mark.parametrize("path", LEAST)
async def test_statuses(client: httpx.AsyncClient, path: str) -> None:
    for call in (call for call in calls() if call.path == path):
        reply = await client.post(path, json=LEAST[path] | call.fields)
        assert reply.status_code == call.ours, (str(call.fields)[:300], reply.text[:300])
        if call.ours == 400:
            assert reply.json()["error"]["message"]


async def test_routes(client: httpx.AsyncClient) -> None:
    for method, path, _, ours, _ in ROUTES:
        assert (await client.request(method, path)).status_code == ours, (method, path)


def test_what_differs_has_a_reason_and_nothing_else_has() -> None:
    for call in calls():
        assert (call.ours != call.vllm) == bool(call.why), call
    for method, path, vllm, ours, why in ROUTES:
        assert (ours != vllm) == bool(why), (method, path)
    assert len({(call.path, json.dumps(call.fields)) for call in calls()}) == len(calls())
    assert len(calls()) + len(ROUTES) > 200


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("raw", ["", "{", "[]", "5", '{"a": NaN}'])
async def test_what_is_no_json_object(client: httpx.AsyncClient, path: str, raw: str) -> None:
    headers = {"content-type": "application/json"}
    assert (await client.post(path, content=raw, headers=headers)).status_code == 400


@pytest.mark.parametrize("path", BOTH)
async def test_other_statuses_than_400(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path, json=LEAST[path] | {"model": "nothing"})).status_code == 404  # vLLM: 404
    text = {"content-type": "text/plain"}
    assert (await client.post(path, content="{}", headers=text)).status_code == 415  # vLLM: 400
    async with connect(make_app(api_key=("key",))) as keyed:
        assert (await keyed.post(path, json=LEAST[path])).status_code == 401  # vLLM: 401
    full = make_app(engine=FakeEngine(step_seconds=60), max_queued_sequences=1)
    async with connect(full) as busy:
        body = LEAST[TEXT] | {"n": 2, "temperature": 1}
        assert (await busy.post(TEXT, json=body)).status_code == 429  # vLLM: 503, which SDKs take for an outage
