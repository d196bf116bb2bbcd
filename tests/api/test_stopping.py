"""How a server winds up: who is waited for, and the word that each client gets when time is up or a signal insists."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire_server.programs import serving
from quire_server.programs.launch import Stop
from quire_server.programs.serving import _wind_up
from support.fake_engine import FakeEngine
from support.fakes import listening, make_app, make_state

pytestmark = pytest.mark.anyio

ASK = {"prompt": "a", "max_tokens": 400}


class Winding:
    """A listening server, its clients, and the operator's signals."""

    def __init__(self, address: str, engine: FakeEngine, app: Any) -> None:
        self.engine, self.app = engine, app
        self.state = app.state.quire
        loop = asyncio.get_running_loop()
        self.stop = Stop(asked=loop.create_future(), insisted=loop.create_future())
        self.http = httpx.AsyncClient(base_url=address, timeout=300, limits=httpx.Limits(max_connections=None))
        self.supervisor = SimpleNamespace(dead=loop.create_future(), stop=self._stop_engine)
        self.engine_stopped = False

    async def _stop_engine(self) -> None:
        self.engine_stopped = True

    def ask(self, *, path: str = "/v1/completions", **fields: object) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.http.post(path, json=ASK | fields))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(300):
            while len(self.engine.submitted) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def wind_up(self) -> asyncio.Task[None]:
        return asyncio.create_task(
            _wind_up(self.state.settings, self.state, self.supervisor, self.app.state.requests, self.stop)  # type: ignore[arg-type]
        )


@asynccontextmanager
async def winding(**settings: object) -> AsyncIterator[Winding]:
    engine = FakeEngine(step_seconds=0.002)
    app = make_app(make_state(engine=engine, **settings))
    async with listening(app) as server:
        it = Winding(server.address, engine, app)
        async with it.http:
            yield it


def ending(reply: httpx.Response) -> str:
    """What a client makes of it."""
    if reply.status_code != 200:
        assert reply.headers["retry-after"]
        assert reply.headers["connection"] == "close"
        return f"{reply.status_code} {reply.json()['error']['code']}"
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return "whole"
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2]).get("error")
    return "whole stream" if error is None else f"event {error['code']}"


async def test_what_was_accepted_finishes_and_what_is_new_is_refused() -> None:
    async with winding(drain_timeout=600) as it:
        clients = [it.ask(stream=i % 2 == 0, max_tokens=60) for i in range(6)]
        await it.until(6)
        winding_up = it.wind_up()
        await asyncio.sleep(0.02)
        assert ending(await it.ask()) == "503 shutting_down"
        assert (await it.http.get("/health/ready")).status_code == 503
        await winding_up
        assert {ending(reply) for reply in await asyncio.gather(*clients)} == {"whole", "whole stream"}
        assert it.engine_stopped


@pytest.mark.parametrize("how", ["time", "second signal"])
async def test_when_time_is_up_everybody_gets_a_word(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire")
    async with winding(drain_timeout=0.3 if how == "time" else 600) as it:
        begun = [it.ask(stream=True) for _ in range(4)]
        await it.until(4)
        async with asyncio.timeout(300):
            while it.engine.step_id < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        it.engine.hold()
        waiting = [it.ask(stream=i % 2 == 0) for i in range(6)]
        await it.until(10)
        winding_up = it.wind_up()
        if how != "time":
            await asyncio.sleep(0.1)
            it.stop.insisted.set_result(None)
        async with asyncio.timeout(300):  # the drain may take 600
            await winding_up
        assert [ending(reply) for reply in await asyncio.gather(*begun)] == ["event shutting_down"] * 4
        assert [ending(reply) for reply in await asyncio.gather(*waiting)] == ["503 shutting_down"] * 6
        assert it.engine.live == ()
        assert "ending 10 requests" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(("drain_timeout", "end"), [(600, "whole"), (0.3, "503 shutting_down")])
async def test_work_before_the_engine_is_waited_for_and_then_refused(
    drain_timeout: float, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LAST_WORDS_SECONDS", 0.1)
    async with winding(drain_timeout=drain_timeout) as it:
        arrived, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(*_args: object, **_kwargs: object) -> list[int]:
            arrived.set()
            await go_on.wait()
            return [97]

        monkeypatch.setattr(it.state.text, "encode", slowly)
        asking = it.ask(max_tokens=1)
        await arrived.wait()
        started, winding_up = time.monotonic(), it.wind_up()
        if end == "whole":
            await asyncio.sleep(0.1)
            assert not winding_up.done(), "a request that is prepared is accepted work"
            go_on.set()
        await winding_up
        assert end == "whole" or time.monotonic() - started >= drain_timeout, "it was not waited for"
        assert ending(await asking) == end


async def test_a_client_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LAST_WORDS_SECONDS", 0.2)
    async with winding(drain_timeout=0.2) as it:
        it.engine.tokens_per_step = 400
        it.engine.step_seconds = 0.0
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(str(it.http.base_url).rsplit(":", 1)[1].strip("/")), limit=1024
        )
        body = json.dumps({"prompt": ["a"] * 12, "max_tokens": 400, "stream": True, "logprobs": 20}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        writer.write(head % len(body) + body)
        await it.until(12)
        await asyncio.wait_for(it.wind_up(), 300)
        assert reader is not None
        writer.close()
