"""The port before the model is there: probes with progress, 503 for the rest, keys first; later it serves on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from quire_server.http.credentials import Credentials
from quire_server.http.guard import Reply
from quire_server.http.listener import Listening, bind, serve
from quire_server.http.starting import AppSwitch, StartProgress, starting_app
from quire_server.metrics.metrics import while_loading
from quire_server.settings import Settings
from support.fakes import MODEL, make_app, make_state

pytestmark = pytest.mark.anyio

HALF = StartProgress(phase="reading weights", done=500, total=1000, unit="bytes", elapsed_seconds=12.0)
UNKNOWN = StartProgress(phase="starting", done=0, total=0, unit="", elapsed_seconds=0.5)


@asynccontextmanager
async def starting(
    progress: StartProgress = HALF, *, told: list[Reply] | None = None, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    options = Settings(**{"allowed_hosts": ("*",), **settings})
    told = [] if told is None else told
    app = starting_app(
        options,
        lambda: progress,
        lambda: while_loading(MODEL, progress.ratio or 0.0),
        told.append,
        Credentials(options),
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
async def test_readiness_says_how_far_it_is(path: str) -> None:
    async with starting() as client:
        reply = await client.get(path)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "12"  # as long again as until now
    assert reply.headers["x-request-id"]
    error, progress = reply.json()["error"], reply.json()["progress"]
    assert (error["code"], error["type"]) == ("loading", "server_error")
    assert "reading weights, 50 %" in error["message"]
    assert progress == {
        "phase": "reading weights",
        "done": 500,
        "total": 1000,
        "unit": "bytes",
        "percent": 50.0,
        "elapsed_seconds": 12.0,
    }


async def test_nothing_is_claimed_where_nothing_is_known() -> None:
    async with starting(UNKNOWN) as client:
        reply = await client.get("/health")
        assert reply.json()["progress"]["percent"] is None
        assert 1 <= int(reply.headers["retry-after"]) <= 30
        assert "quire_load_progress_ratio" in (await client.get("/metrics")).text


async def test_it_is_alive_and_has_a_metric() -> None:
    async with starting() as client:
        live, metrics = await client.get("/health/live"), await client.get("/metrics")
    assert (live.status_code, live.json()) == (200, {"status": "live"})
    assert metrics.status_code == 200
    assert 'quire_load_progress_ratio{model_name="fake"} 0.5' in metrics.text


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/nothing"), ("POST", "/health/live")],
)
async def test_everything_else_comes_back_later(method: str, path: str) -> None:
    async with starting(root_path="/llm") as client:
        for prefix in ("", "/llm"):
            reply = await client.request(method, prefix + path, content=b"{}")
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "loading"
            assert reply.headers["retry-after"]


async def test_a_browser_gets_a_page_that_asks_again() -> None:
    async with starting(root_path="/llm") as client:
        for path in ("/", "/llm/dashboard"):
            reply = await client.get(path, headers={"accept": "text/html,*/*;q=0.8"})
            assert reply.status_code == 503
            assert reply.headers["content-type"].startswith("text/html")
            assert reply.headers["refresh"] == "2"
            assert "reading weights, 50 %" in reply.text
            assert "<script" not in reply.text


async def test_each_but_a_probe_is_told_of() -> None:
    told: list[Reply] = []
    async with starting(told=told) as client:
        for path in ("/health/ready", "/metrics", "/v1/models"):
            await client.get(path)
    assert [(reply.path, reply.status) for reply in told] == [("/v1/models", 503)]


async def test_in_the_envelope_of_the_path() -> None:
    async with starting() as client:
        reply = await client.post("/v1/messages", content=b"{}")
    assert reply.json()["error"]["type"] == "overloaded_error"
    assert reply.json()["error"]["details"] == {"error_code": "loading"}


async def test_keys_hosts_and_limits_come_first() -> None:
    async with starting(api_key=("key",), allowed_hosts=("server",), max_body_bytes=2048) as client:
        assert (await client.post("/v1/completions")).status_code == 401
        assert (await client.get("/v1/models", headers={"authorization": "Bearer key"})).status_code == 503
        assert (await client.get("/v1/models", headers={"host": "evil.example"})).status_code == 403
        headers = {"authorization": "Bearer key", "content-length": "4096"}
        assert (await client.post("/v1/completions", headers=headers)).status_code == 413
        assert (await client.get("/admin/drain")).status_code == 403
        assert (await client.get("/health/ready", headers={"host": "10.0.0.7"})).status_code == 503


async def test_a_connection_that_was_opened_while_loading_serves_on() -> None:
    state = make_state(port=0)
    switch = AppSwitch(
        starting_app(state.settings, lambda: HALF, lambda: while_loading(MODEL, 0.5), [].append, state.credentials)
    )
    started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(switch, state.settings, sock=bind(state.settings), on_started=started.set_result)
    )
    listening = await started
    try:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=listening.address, limits=limits) as client:
            assert (await client.get("/v1/models")).status_code == 503
            assert not state.tasks
            await switch.open(make_app(state))
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
            assert len(state.tasks) == 3, "the application's own tasks run"
    finally:
        listening.stop(True)
        await serving
    assert not state.tasks, "and have ended with the listener"
