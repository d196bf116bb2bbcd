"""What probes say of an engine that stands still, of tasks that have ended, and of one that computes."""

from __future__ import annotations

import asyncio

import pytest

from quire_server.answering import deep_check
from quire_server.state import REMEDY_SECONDS, ServerState
from support.events import until
from support.fake_engine import FakeEngine
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio


async def statuses(state: ServerState) -> tuple[int, int, str]:
    """Of live and ready, and why not."""
    async with connect(make_app(state)) as client:
        live, ready = await client.get("/health/live"), await client.get("/health/ready")
        assert (await client.get("/health")).status_code == ready.status_code
        failed = live if live.status_code != 200 else ready
        return live.status_code, ready.status_code, failed.json().get("error", {}).get("code", "")


@pytest.mark.parametrize(("overdue", "status"), [(-5.0, 200), (REMEDY_SECONDS - 0.1, 200), (REMEDY_SECONDS + 0.1, 503)])
async def test_an_engine_that_nobody_replaces_though_it_hangs_is_not_survived(overdue: float, status: int) -> None:
    state = make_state()
    state.engines.overdue_seconds = lambda: overdue
    state.engines.trouble = lambda: "engine stuck"
    assert await statuses(state) == (status, 503, "engine_stuck" if status == 200 else "engine_hung")


async def test_a_task_that_has_ended_is_not_survived() -> None:
    state = make_state()
    app = make_app(state)
    async with app.router.lifespan_context(app):
        assert await statuses(state) == (200, 200, "")
        state.tasks[0].cancel()
        await asyncio.gather(state.tasks[0], return_exceptions=True)
        assert await statuses(state) == (503, 200, "task_ended")


async def test_an_engine_that_restarts_is_alive() -> None:
    state = make_state()
    state.engines.trouble = lambda: "engine restarting"
    assert await statuses(state) == (200, 503, "engine_restarting")


async def test_the_deep_check_has_a_token_computed() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        reply = await client.get("/health/deep")
        assert reply.status_code == 200
        assert reply.json()["status"] == "computes"
        assert reply.json()["seconds"] >= 0
    (asked,) = engine.submitted
    assert (asked.stop.max_new_tokens, asked.n) == (1, 1)
    assert engine.live == ()


async def test_many_deep_checks_are_one() -> None:
    engine = FakeEngine()
    engine.hold()
    async with connect(make_app(engine=engine)) as client:
        asking = [asyncio.create_task(client.get("/health/deep")) for _ in range(20)]
        await asyncio.sleep(0.05)
        asking[0].cancel()
        engine.release()
        assert {reply.status_code for reply in await asyncio.gather(*asking[1:])} == {200}
    assert len(engine.submitted) == 1


async def test_a_deep_check_needs_no_place_in_the_queue() -> None:
    engine = FakeEngine()
    engine.hold()
    async with connect(make_app(engine=engine, max_queued_sequences=1)) as client:
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}))
        await asyncio.sleep(0.05)
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 429
        checking = asyncio.create_task(client.get("/health/deep"))
        await asyncio.sleep(0.05)
        engine.release()
        assert ((await first).status_code, (await checking).status_code) == (200, 200)


async def test_an_engine_that_computes_nothing_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_check, "DEEP_SECONDS", 0.1)
    engine = FakeEngine()
    engine.hold()
    async with connect(make_app(engine=engine)) as client:
        reply = await client.get("/health/deep")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "check_failed")
    assert len(engine.aborted) == 1
    async with connect(make_app(engine=FakeEngine(fail_after=0))) as client:
        assert (await client.get("/health/deep")).status_code == 500


async def test_the_deep_check_is_no_public_path() -> None:
    async with connect(make_app(api_key=("key",))) as client:
        assert (await client.get("/health/deep")).status_code == 401
        assert (await client.get("/health/deep", headers={"x-api-key": "key"})).status_code == 200


async def test_balancers_need_no_key() -> None:
    async with connect(make_app(api_key=("secret-of-the-client",))) as client:
        for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/load")):
            assert (await client.request(method, path)).status_code == 200


async def test_ping_is_the_readiness() -> None:
    state = make_state()
    async with connect(make_app(state)) as client:
        for method in ("GET", "POST"):
            assert (await client.request(method, "/ping")).json() == {"status": "ready"}
        state.phase.draining = True
        for method in ("GET", "POST"):
            assert (await client.request(method, "/ping")).status_code == 503


async def test_load_is_the_number_of_requests() -> None:
    engine = FakeEngine(step_seconds=0.005)
    engine.hold()
    state = make_state(engine=engine)
    async with connect(make_app(state)) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        waiting = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"})) for _ in range(3)]
        await until(lambda: state.client.in_flight == 3)
        assert (await client.get("/load")).json() == {"server_load": 3}
        engine.release()
        await asyncio.gather(*waiting)
        assert (await client.get("/load")).json() == {"server_load": 0}
