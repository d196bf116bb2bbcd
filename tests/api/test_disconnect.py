"""A client that leaves ends its work, also where the reply is not a stream."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import httpx
import pytest
from fastapi import Request

from quire_server.errors import BadRequest, ClientGone
from quire_server.http.disconnect import unless_client_gone
from support.fake_engine import FakeEngine
from support.fakes import listening, make_app, make_state

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], bool], patience: float = 300.0) -> None:
    async with asyncio.timeout(patience):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def request_that_hears(*messages: dict[str, object]) -> Request:
    """A request whose client says `messages` and then nothing."""
    queue = list(messages)

    async def receive() -> dict[str, object]:
        if queue:
            return queue.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


async def test_the_result_is_passed_on() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await unless_client_gone(request_that_hears(), work()) == 7


async def test_an_error_is_passed_on() -> None:
    async def work() -> int:
        raise BadRequest("no")

    with pytest.raises(BadRequest):
        await unless_client_gone(request_that_hears(), work())


async def test_leaving_cancels_and_waits_for_the_clean_up() -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            steps.append("cancelled")
            await asyncio.sleep(0.01)
            steps.append("cleaned up")

    with pytest.raises(ClientGone):
        await unless_client_gone(request_that_hears({"type": "http.disconnect"}), work())
    assert steps == ["cancelled", "cleaned up"]


async def test_cancelling_the_handler_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()  # for ever
        finally:
            ended.set()

    task = asyncio.create_task(unless_client_gone(request_that_hears(), work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "temperature": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_client_that_leaves_frees_its_place(path: str, body: dict[str, object]) -> None:
    engine = FakeEngine(step_seconds=0.02)
    state = make_state(engine=engine)
    async with listening(make_app(state)) as server:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            asking = asyncio.create_task(client.post(path, json={**body, "max_tokens": 500, "ignore_eos": True}))
            await until(lambda: engine.step_id >= 3)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not engine.live)
        assert engine.step_id < 400  # of 500 that were asked for
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.submitted)
        assert state.client.in_flight == 0
        text = state.metrics.render().decode()
        assert f'quire_http_requests_total{{handler="{path}",method="POST",model_name="fake",status="499"}} 1.0' in text


async def leave_during(work: str, path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine after a client has left while its request was worked on, and the work had gone on for a while."""
    engine = FakeEngine()
    state = make_state(engine=engine)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(*_: object, **__: object) -> str:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return ""

    owner, name = work.split(".")
    monkeypatch.setattr(getattr(state, owner), name, slow)
    async with listening(make_app(state)) as server:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            asking = asyncio.create_task(client.post(path, json=body))
            await asyncio.wait_for(begun.wait(), 300)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(ended.wait(), 300)
    return engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("work", "path", "body"),
    [
        ("text.render", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("text.encode", "/v1/completions", {"prompt": "a"}),
        (
            "grammars.accept",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}},
        ),
        ("text.encode", "/v1/embeddings", {"input": ["a", "b"]}),
        ("text.encode", "/tokenize", {"prompt": "a"}),
        ("text.render", "/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_work_before_the_engine_dies_with_its_client(
    work: str, path: str, body: dict[str, object], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stream and "input" not in body and path in {"/v1/chat/completions", "/v1/completions"}:
        body = {**body, "stream": True}
    engine = await leave_during(work, path, body, monkeypatch)
    assert engine.submitted == []


async def test_who_has_left_before_the_engine_is_asked_never_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has had no time to look at its sockets: the system is asked."""
    engine = FakeEngine()
    state = make_state(engine=engine)
    encode, asked = state.text.encode, asyncio.Event()

    async def blocking(*args: str, **options: bool) -> list[int]:
        asked.set()
        time.sleep(0.3)  # noqa: ASYNC251 - as a loop that is late
        return await encode(*args, **options)

    monkeypatch.setattr(state.text, "encode", blocking)
    body = b'{"prompt": "a", "max_tokens": 400}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

    def ask_and_leave(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(head % len(body) + body)
            time.sleep(0.1)

    async with listening(make_app(state)) as server:
        await asyncio.to_thread(ask_and_leave, server.port)
        await asyncio.wait_for(asked.wait(), 300)
        await asyncio.sleep(0.3)
    assert engine.submitted == []
