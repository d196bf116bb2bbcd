"""The data of the page /learn, told while somebody looks; and a pace that only an operator sets, if it is allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from quire_engine.contract.errors import EngineDead, Unanswerable
from quire_engine.engine import Engine
from quire_engine.process.loop import inspected
from quire_engine.process.pace import Pace
from quire_engine.process.transport import Inspect
from quire_server.learning import watch as module
from quire_server.routes import learn
from quire_server.state import ServerState
from support.fake_executor import Run, new_run, request
from support.fakes import connect, listening, make_app, make_state

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "TELL_SECONDS", 0.02)


class Told:
    """A page's stream from a scheduler that the test steps, and the orders that the engine got."""

    def __init__(self, run: Run, state: ServerState, client: httpx.AsyncClient) -> None:
        self.run, self.state, self.client = run, state, client
        self.questions = 0
        self.orders: list[dict] = []
        self.pace = Pace()
        self.dead = False
        self.engine = Engine(run.scheduler, run.executor)

    async def inspect(self, what: str, argument: str) -> bytes:
        self.questions += 1
        if self.dead:
            raise EngineDead("no engine is there to be asked")
        answer = inspected(self.engine, Inspect(token=1, what=what, argument=argument))
        if answer.error:
            raise Unanswerable(answer.error)
        return answer.body

    async def control(self, what: str, argument: str) -> bytes:
        assert what == "pace"
        self.orders.append(json.loads(argument))
        return json.dumps(self.pace.order(self.orders[-1], asyncio.get_running_loop().time())).encode()

    async def orders_more_than(self, count: int) -> None:
        while len(self.orders) <= count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def told(**settings: object) -> AsyncIterator[Told]:
    run, state = new_run(), make_state(**settings)
    async with (
        listening(make_app(state)) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as client,
        asyncio.timeout(300),
    ):
        it = Told(run, state, client)
        state.engines.inspect, state.engines.control = it.inspect, it.control
        yield it


@asynccontextmanager
async def page(it: Told) -> AsyncIterator[AsyncIterator[dict]]:
    async with it.client.stream("GET", "/learn/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")

        async def messages() -> AsyncIterator[dict]:
            async for line in reply.aiter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))

        yield messages()


async def test_a_page_gets_every_step_and_the_pool() -> None:
    async with told() as it, page(it) as messages:
        about = (await anext(messages))["server"]
        assert (about["may_pause"], about["num_blocks"], about["model"]) == (False, 100, "fake")
        first = await anext(messages)
        assert (first["steps"], first["pool"]["tables"], first["pace"]["mode"]) == ([], [], "run")
        it.run.add(request("a", 20, 6))
        steps: list[int] = []
        held = []
        while it.run.scheduler.has_work:
            it.run.one_step()
            message = await anext(messages)
            while not message["steps"]:
                message = await anext(messages)
            steps += [step["step_id"] for step in message["steps"]]
            held.append([table["request_id"] for table in message["pool"]["tables"]])
        assert steps == [1, 2, 3, 4, 5, 6]
        assert held[0] == ["a"]
        assert held[-1] == []
        async with page(it) as others:  # who comes later gets the last ones first
            await anext(others)
            late = await anext(others)
            assert [step["step_id"] for step in late["steps"]] == steps


async def test_nobody_looks_and_nothing_is_asked() -> None:
    async with told(learn=True) as it:
        async with page(it) as messages:
            await anext(messages)
            await anext(messages)
            assert (await it.client.post("/admin/pace", json={"mode": "pause"})).json()["mode"] == "pause"
        await it.orders_more_than(1)
        # The last viewer has gone: nothing waits any more.
        while it.orders[-1] != {"mode": "run"}:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        asked = it.questions
        await asyncio.sleep(0.1)
        assert it.questions == asked


async def test_a_pace_is_repeated_while_somebody_looks() -> None:
    async with told(learn=True) as it, page(it) as messages:
        assert (await anext(messages))["server"]["may_pause"] is True
        order = {"mode": "slow", "seconds": 0.5}
        assert (await it.client.post("/admin/pace", json=order)).json() == {**order, "steps_left": 0}
        await it.orders_more_than(3)
        assert it.orders[:1] == [order]
        assert it.orders[1:4] == [{}] * 3
        while (message := await anext(messages))["pace"]["mode"] != "slow":
            continue
        assert message["pace"]["seconds"] == 0.5


async def test_a_server_that_was_not_started_for_it_is_not_paused() -> None:
    async with told() as it:
        reply = await it.client.post("/admin/pace", json={"mode": "pause"})
        assert reply.status_code == 403
        assert "--set learn=true" in reply.json()["error"]["message"]
        assert it.orders == []


@pytest.mark.parametrize(
    "order", [{}, {"mode": "stop"}, {"mode": "slow", "seconds": 60}, {"mode": "pause", "steps": 65}]
)
async def test_an_order_that_cannot_be_is_refused(order: dict) -> None:
    async with told(learn=True) as it:
        assert (await it.client.post("/admin/pace", json=order)).status_code == 400
        assert it.orders == []


async def test_the_engines_refusal_is_told_in_its_words() -> None:
    async with told(learn=True) as it:
        reply = await it.client.post("/admin/pace", json={"mode": "run", "steps": 1})
        assert reply.status_code == 400
        assert "for a pause" in reply.json()["error"]["message"]


async def test_trouble_with_the_engine_is_told_and_ends() -> None:
    async with told() as it, page(it) as messages:
        await anext(messages)
        await anext(messages)
        it.dead = True
        while "trouble" not in (message := await anext(messages)):
            continue
        assert "no engine" in message["trouble"]
        it.dead = False
        while "trouble" in await anext(messages):
            continue


async def test_a_stopping_server_is_not_held_up() -> None:
    async with told() as it, page(it) as messages:
        await anext(messages)
        it.state.phase.draining = it.state.phase.stopping = True
        assert len([message async for message in messages]) <= 3


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/learn/events"),
        ("POST", "/admin/pace"),
        ("POST", "/learn/exercises/itl"),
        ("DELETE", "/learn/exercises"),
    ],
)
async def test_it_is_for_this_machine_or_an_admin_key(method: str, path: str) -> None:
    app = make_app(learn=True)
    transport = httpx.ASGITransport(app=app, client=("10.0.0.5", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as caller:
        assert (await caller.request(method, path)).status_code == 403
    async with connect(make_app(learn=True, admin_api_key=("operator",))) as caller:
        assert (await caller.request(method, path)).status_code == 401


async def test_only_so_many_look_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "MOST_VIEWERS", 1)
    async with told() as it, page(it) as messages:
        await anext(messages)
        await anext(messages)
        reply = await it.client.get("/learn/events")
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "10"


async def test_exercises_are_graded_by_what_the_engine_did() -> None:
    async with told() as it, page(it) as messages:
        about = (await anext(messages))["server"]
        assert len(about["exercises"]) == 11
        assert not any(one["done"] for one in (await anext(messages))["exercises"])
        it.run.add(request("a", 18, 6, n=3))
        it.run.to_end()
        done: list[str] = []
        while not done:
            done = [one["name"] for one in (await anext(messages))["exercises"] if one["done"]]
        assert done == ["copy"]
        reply = await it.client.post("/learn/exercises/itl", json={"answer": 40})
        assert reply.status_code == 200
        assert reply.json()["done"] is False
        assert "are needed" in reply.json()["said"]
        for name, body, status in (("share", {"answer": 4}, 404), ("itl", {}, 400), ("itl", {"answer": -1}, 400)):
            assert (await it.client.post(f"/learn/exercises/{name}", json=body)).status_code == status
        assert (await it.client.delete("/learn/exercises")).status_code == 204
        while any(one["done"] for one in (await anext(messages))["exercises"]):
            continue
