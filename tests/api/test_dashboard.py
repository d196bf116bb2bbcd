"""The dashboard's stream: what it tells, to whom, and that it ends with the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from quire_server import app as app_module
from quire_server.routes import dashboard as module
from quire_server.routes.dashboard import Feed
from support.fake_engine import FakeEngine
from support.fakes import connect, listening, make_app, make_state

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _short_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "SECOND", 0.05)


async def messages(reply: httpx.Response) -> AsyncIterator[dict]:
    async for line in reply.aiter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


async def test_the_past_comes_first_and_then_each_second() -> None:
    engine = FakeEngine(step_seconds=0.01)
    state = make_state(engine=engine)
    async with (
        listening(make_app(state)) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        body = {"prompt": "ZQ", "max_tokens": 5, "temperature": 0}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        async with client.stream("GET", "/dashboard/events") as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            told = messages(reply)
            first = await anext(told)
            now = (await anext(told))["now"]
            assert first["server"]["model"] == "fake"
            assert first["server"]["num_blocks"] == 100
            assert all("blocks" in frame for frame in first["past"]["frames"])
            assert now["frame"]["finished"] + sum(frame["finished"] for frame in first["past"]["frames"]) == 1
            row = now["requests"][0]
            assert (row["state"], row["prompt_tokens"], row["generated_tokens"]) == ("length", 2, 5)
            assert "ZQ" not in json.dumps(now), "no text of anybody"
            state.phase.draining = state.phase.stopping = True
            last = [message async for message in told]
        assert 1 <= len(last) <= 5, "a drained server lets go of those who look on"


async def test_a_draining_server_is_watched_to_the_end_of_its_work() -> None:
    engine = FakeEngine()
    engine.hold()
    state = make_state(engine=engine)
    async with (
        listening(make_app(state)) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}))
        async with client.stream("GET", "/dashboard/events") as reply:
            told = messages(reply)
            await anext(told)
            while not (await anext(told))["now"]["num_live"]:
                continue
            state.phase.draining = state.phase.stopping = True
            assert (await anext(told))["now"]["num_live"] == 1
            engine.release()
            assert (await asking).status_code == 200
            assert [message async for message in told]


@pytest.mark.parametrize(
    ("client", "headers", "status"),
    [
        (("127.0.0.1", 1), {}, 200),
        (("::1", 1), {}, 200),
        (("::ffff:127.0.0.1", 1), {}, 200),
        (("10.0.0.5", 1), {}, 403),
        (("127.0.0.1", 1), {"x-forwarded-for": "10.0.0.5"}, 403),
        (("127.0.0.1", 1), {"forwarded": "for=127.0.0.1"}, 403),
    ],
)
async def test_it_is_for_this_machine_alone(client: tuple[str, int], headers: dict[str, str], status: int) -> None:
    state = make_state()
    app = make_app(state)
    state.phase.draining = state.phase.stopping = True  # so that the stream ends
    state.metrics.tick()
    telling = asyncio.create_task(app_module.tell_seconds(state.metrics, app.state.feed))
    transport = httpx.ASGITransport(app=app, client=client)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as caller:
        reply = await caller.get("/dashboard/events", headers=headers)
    telling.cancel()
    assert reply.status_code == status
    if status == 403:
        assert reply.json()["error"]["code"] == "admin_only"


async def test_only_so_many_look_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_VIEWERS", 2)
    app = make_app()
    app.state.feed.num_listeners = 2
    async with connect(app) as client:
        reply = await client.get("http://127.0.0.1/dashboard/events")
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "10"


async def test_a_slow_listener_gets_the_latest() -> None:
    feed = Feed()
    waiting = [asyncio.create_task(feed.next()) for _ in range(2)]
    await asyncio.sleep(0)
    feed.publish(b"1")
    feed.publish(b"2")
    assert [await task for task in waiting] == [b"2", b"2"]
    late = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    assert not late.done(), "what was told already is not told again"
    feed.publish(b"3")
    assert await late == b"3"
