"""A full queue: refused before anything is done, in the words of a refusal that comes later."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from quire_server.http import overload
from quire_server.text import text_threads
from support.fake_engine import FakeEngine
from support.fakes import connect, listening, make_app, make_state

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


async def fill(engine: FakeEngine, client: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
    """Take the queue's only place."""
    engine.hold()
    task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}))
    while not engine.live:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return task


async def test_it_is_refused_before_its_body_is_looked_at() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=1)
    async with connect(make_app(state)) as client:
        first = await fill(engine, client)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"):
            reply = await client.post(path, content=b"{not json", headers={"x-request-id": "mine"})
            assert reply.status_code == 429, path
            assert int(reply.headers["retry-after"]) >= 1
            assert int(reply.headers["retry-after-ms"]) >= 1000
            assert reply.headers["x-request-id"] == "mine"
            assert "its queue is full" in reply.json()["error"]["message"]
        assert state.metrics.render().decode().count('quire_rejected_total{model_name="fake",reason="max_num') == 2
        assert f'reason="max_num_queued_reqs"}} {5.0}' in state.metrics.render().decode()
        assert 'handler="/v1/chat/completions",method="POST",model_name="fake",status="429"' in (
            state.metrics.render().decode()
        )
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        engine.release()
        assert (await first).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_text_that_waited_while_the_queue_filled_is_not_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=1)
    rendered = []
    monkeypatch.setattr(overload, "_LATELY_SECONDS", 0.0)  # as if each had waited for long
    monkeypatch.setattr(text_threads.ChatTemplate, "render", lambda *_, **__: rendered.append(1) or "a")
    slots = state.text._rendering_short = text_threads.SlotQueue(1)
    async with connect(make_app(state)) as client:
        await slots.take(1)
        chats = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(20)]
        count = asyncio.create_task(client.post("/v1/messages/count_tokens", json={**CHAT, "model": "fake"}))
        while len(slots._waiting) < 21:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        first = await fill(engine, client)
        slots.release()
        for reply in await asyncio.gather(*chats):
            assert reply.status_code == 429
            assert "its queue is full" in reply.json()["error"]["message"]
        assert (await count).status_code == 200  # nothing of it is queued
        assert len(rendered) == 1
        engine.release()
        assert (await first).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert slots._num_free == 1


async def test_those_underway_to_a_full_queue_count() -> None:
    """Otherwise a place that comes free would let everybody pass who comes until it is taken."""
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=66)
    slots = state.text._rendering_short = text_threads.SlotQueue(1)
    async with connect(make_app(state)) as client:
        engine.hold()
        wide = {"prompt": "a", "n": 16, "temperature": 1}
        running = [asyncio.create_task(client.post("/v1/completions", json=wide)) for _ in range(4)]
        async with asyncio.timeout(300):
            while len(engine.live) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await slots.take(1)
        chats = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(30)]
        async with asyncio.timeout(300):
            while sum(task.done() for task in chats) < 30 - 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        done, underway = await asyncio.wait(chats, timeout=0.1)
        assert len(underway) == 2 + 1  # as many as there are places, and one where another may never arrive
        assert {task.result().status_code for task in done} == {429}
        slots.release()
        async with asyncio.timeout(300):
            while sum(task.done() for task in underway) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        engine.release()
        assert sorted(reply.status_code for reply in await asyncio.gather(*underway)) == [200] * 2 + [429]
        assert {reply.status_code for reply in await asyncio.gather(*running)} == {200}


async def test_seats_that_are_free_are_kept_for_those_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of them, texts that take long would keep everybody out; for none, an empty queue would let in a flood."""
    monkeypatch.setattr(overload, "_LATELY_SECONDS", 60.0)
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=10)
    slots = state.text._rendering_short = text_threads.SlotQueue(1)
    async with connect(make_app(state)) as client:
        await slots.take(1)
        chats = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(30)]
        async with asyncio.timeout(300):
            while sum(task.done() for task in chats) < 19:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        monkeypatch.setattr(overload, "_LATELY_SECONDS", 0.0)  # as if the last second were over
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        slots.release()
        statuses = sorted(reply.status_code for reply in await asyncio.gather(*chats))
        assert statuses[-19:] == [429] * 19
        assert statuses[:10] == [200] * 10


async def test_it_reads_as_one_that_comes_later() -> None:
    """A request for more than the places that are left is refused by the queue itself."""
    engine = FakeEngine()
    async with connect(make_app(engine=engine, max_queued_sequences=1)) as client:
        late = await client.post("/v1/completions", json={"prompt": "a", "n": 2, "temperature": 1})
        first = await fill(engine, client)
        early = await client.post("/v1/completions", json={"prompt": "a"})
        assert (late.status_code, late.json()) == (early.status_code, early.json())
        assert late.headers.keys() == early.headers.keys()
        anthropic = await client.post("/v1/messages", json={})
        assert anthropic.json()["error"]["type"] == "rate_limit_error"
        engine.release()
        await first


async def test_a_key_is_asked_for_first() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine, max_queued_sequences=1, api_key=["k"])) as client:
        client.headers["authorization"] = "Bearer k"
        first = await fill(engine, client)
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 429
        client.headers["authorization"] = "Bearer other"
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 401
        engine.release()
        await first


async def test_a_draining_server_says_so_instead() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=1)
    async with connect(make_app(state)) as client:
        first = await fill(engine, client)
        state.phase.draining = True
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        engine.release()
        await first


async def test_the_connection_serves_the_next_request_whatever_body_was_left() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=1)
    app = make_app(state)
    async with listening(app) as server, connect(app) as other:
        first = await fill(engine, other)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        big = json.dumps({"prompt": "x" * 40_000}).encode()
        for _ in range(2):
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(big) + big
            )
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 300)
            assert head.startswith(b"HTTP/1.1 429 ")
            size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(size.split(b":")[1]))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        engine.release()
        await first


async def test_the_connection_closes_where_too_much_of_the_body_is_still_to_come() -> None:
    engine = FakeEngine()
    app = make_app(make_state(engine=engine, max_queued_sequences=1, body_timeout=3600, timeout_keep_alive=3600))
    async with listening(app) as server, connect(app) as other:
        first = await fill(engine, other)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 400000\r\n\r\n{"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 300)
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"connection: close" in head.lower()
        await asyncio.wait_for(reader.read(), 300)  # to its end
        writer.close()
        engine.release()
        await first
