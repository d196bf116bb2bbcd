"""/admin: drain and undo, ending requests, emptying the prefix cache; what each says, and what clients get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from quire_engine.contract.errors import EngineDead, Unanswerable
from quire_engine.engine import Engine
from quire_engine.process.loop import controlled
from quire_engine.process.transport import Control
from quire_server.state import ServerState
from support.fake_engine import FakeEngine
from support.fake_executor import new_run, request
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio

ASK = {"prompt": "a", "max_tokens": 50}


class Operated:
    """An app with a held engine, its operator, and clients that wait."""

    def __init__(self, client: httpx.AsyncClient, state: ServerState, engine: FakeEngine) -> None:
        self.client = client
        self.state = state
        self.engine = engine

    async def ask(self, name: str, **fields: object) -> asyncio.Task[httpx.Response]:
        """A completion that does not end by itself."""
        before = len(self.engine.submitted)
        asking = self.client.post("/v1/completions", json=ASK | fields, headers={"x-request-id": name})
        task = asyncio.create_task(asking)
        async with asyncio.timeout(300):
            while len(self.engine.submitted) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return task

    async def order(self, path: str, status: int = 200, method: str = "POST", **body: object) -> dict[str, object]:
        reply = await self.client.request(method, path, **({"json": body} if body else {}))
        assert reply.status_code == status, reply.text
        answer: dict[str, object] = reply.json()
        return answer


@asynccontextmanager
async def operated(**settings: object) -> AsyncIterator[Operated]:
    engine = FakeEngine()
    engine.hold()
    state = make_state(engine=engine, **settings)
    async with connect(make_app(state), headers={"host": "localhost"}) as client:
        yield Operated(client, state, engine)
    engine.release()


async def test_draining_refuses_what_is_new_and_can_be_undone() -> None:
    async with operated() as it:
        running = await it.ask("first")
        assert await it.order("/admin/drain", method="GET") == {"draining": False, "in_flight": 1}
        for _ in range(2):
            assert await it.order("/admin/drain") == {"draining": True, "in_flight": 1}
        refused = await it.client.post("/v1/completions", json=ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        assert (await it.client.get("/health/ready")).status_code == 503
        assert (await it.client.get("/health/live")).status_code == 200
        for _ in range(2):
            assert (await it.order("/admin/drain", method="DELETE"))["draining"] is False
        assert (await it.client.get("/health/ready")).status_code == 200
        it.engine.release()
        assert (await running).status_code == 200
        assert (await it.client.post("/v1/completions", json=ASK)).status_code == 200


async def test_a_server_that_stops_cannot_be_talked_out_of_it() -> None:
    async with operated() as it:
        it.state.phase.draining = it.state.phase.stopping = True
        answer = await it.order("/admin/drain", 409, "DELETE")
        assert answer["error"]["code"] == "shutting_down"  # type: ignore[index]
        assert it.state.draining
        refused = await it.client.post("/v1/completions", json=ASK)
        assert refused.json()["error"]["code"] == "shutting_down"


async def test_one_request_is_ended_by_the_name_that_its_client_has() -> None:
    async with operated() as it:
        one, other = await it.ask("one", prompt=["a", "b"]), await it.ask("other")
        assert await it.order("/admin/abort", request_id="one") == {"num_aborted": 2, "request_ids": ["one"]}
        reply = await one
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "aborted")
        assert reply.headers["x-should-retry"] == "false"
        assert sorted(it.engine.aborted) == sorted(each.request_id for each in it.engine.submitted[:2])
        assert it.state.client.in_flight == 1
        assert "error" in await it.order("/admin/abort", 404, request_id="one")
        it.engine.release()
        assert (await other).status_code == 200


async def test_a_prefix_of_a_name_ends_nobody() -> None:
    async with operated() as it:
        running = await it.ask("cmpl-abcdef")
        for name in ("c", "cmpl-", "cmpl-abcde", "cmpl-abcdefg", "*"):
            await it.order("/admin/abort", 404, request_id=name)
        assert it.engine.live
        it.engine.release()
        assert (await running).status_code == 200


async def test_a_stream_that_has_begun_ends_with_one_event() -> None:
    async with operated() as it:
        it.engine.step_seconds = 0.001
        it.engine.release()
        async with asyncio.timeout(300):
            streaming = asyncio.create_task(
                it.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 400, "stream": True})
            )
            while it.engine.step_id < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert (await it.order("/admin/abort", all=True))["num_aborted"] == 1
            lines = [line for line in (await streaming).text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "aborted"
        assert not any('"error"' in line for line in lines[:-2])


async def test_all_of_a_tenant_or_of_everybody() -> None:
    async with operated(
        api_key=("acme=0123456789", "beta=9876543210"), scheduling_policy="wfq", allow_local_admin=True
    ) as it:
        keys = {"acme": "0123456789", "beta": "9876543210"}
        tasks = {}
        for name in ("acme", "beta"):
            it.client.headers["authorization"] = f"Bearer {keys[name]}"
            tasks[name] = [await it.ask(f"{name}-{i}") for i in range(2)]
        assert (await it.order("/admin/abort", tenant="acme"))["request_ids"] == ["acme-0", "acme-1"]
        assert (await it.order("/admin/abort", tenant="acme"))["num_aborted"] == 0
        assert {(await task).status_code for task in tasks["acme"]} == {503}
        assert (await it.order("/admin/abort", all=True))["request_ids"] == ["beta-0", "beta-1"]
        assert {(await task).status_code for task in tasks["beta"]} == {503}
        assert it.engine.live == ()


@pytest.mark.parametrize("body", [{}, {"all": False}, {"all": True, "tenant": "a"}, {"request_id": ""}, {"ids": "x"}])
async def test_an_order_that_is_not_clear_is_refused(body: dict[str, object]) -> None:
    async with operated() as it:
        running = await it.ask("one")
        reply = await it.client.post("/admin/abort", json=body)
        assert reply.status_code == 400
        assert it.engine.live
        it.engine.release()
        await running


async def test_the_prefix_cache_is_emptied_by_the_engine() -> None:
    run = new_run()
    engine = Engine(run.scheduler, run.executor)
    run.add(request("a", 40, 2))
    run.to_end()

    async def control(what: str, argument: str) -> bytes:
        answer = controlled(engine, Control(token=1, what=what, argument=argument))
        if answer.error:
            raise Unanswerable(answer.error)
        return answer.body

    async with operated() as it:
        it.state.engines.control = control
        first = await it.order("/admin/reset-prefix-cache")
        assert first["host_blocks"] == 0
        assert first["device_blocks"] > 0  # type: ignore[operator]
        assert await it.order("/admin/reset-prefix-cache") == {"device_blocks": 0, "host_blocks": 0}
        with pytest.raises(Unanswerable, match="no such order"):
            await control("format_disk", "{}")


async def test_an_engine_that_is_gone_is_a_503() -> None:
    async def control(_what: str, _argument: str) -> bytes:
        raise EngineDead("no engine is there to be asked")

    async with operated() as it:
        it.state.engines.control = control
        reply = await it.client.post("/admin/reset-prefix-cache")
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/admin/drain"), ("POST", "/admin/drain"), ("DELETE", "/admin/drain")),
        *(("POST", "/admin/abort"), ("POST", "/admin/reset-prefix-cache")),
        *(("GET", "/admin/models"), ("POST", "/admin/load"), ("POST", "/admin/sleep"), ("POST", "/admin/unload")),
        *(("GET", "/admin/replicas"), ("POST", "/admin/replicas/0/drain"), ("DELETE", "/admin/replicas/0/drain")),
    ],
)
async def test_none_of_it_is_for_clients(method: str, path: str) -> None:
    state = make_state(api_key=("ordinary",), admin_api_key=("operator",))
    async with connect(make_app(state), headers={"host": "localhost"}) as client:
        for headers in ({}, {"authorization": "Bearer ordinary"}):
            reply = await client.request(method, path, headers=headers, json={"all": True})
            assert reply.status_code == 401
        assert not state.draining
    page = {"host": "localhost", "origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    state = make_state()
    async with connect(make_app(state), headers=page) as client:
        assert (await client.request(method, path)).status_code == 403
        assert not state.draining


@pytest.mark.parametrize("level", [True, "1", 1.5, 0, 3, None])
async def test_a_level_of_sleep_is_one_or_two(level: object) -> None:
    async with operated() as it:
        refused = await it.client.post("/admin/sleep", json={"model": it.state.model_names[0], "level": level})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "level"
        taken = await it.client.post("/admin/sleep", json={"model": it.state.model_names[0], "level": 2})
        assert taken.json()["error"]["code"] == "one_model"
