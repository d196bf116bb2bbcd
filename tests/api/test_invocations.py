"""The routes of balancers and of SageMaker, which vLLM has too: /ping, /load and /invocations."""

from __future__ import annotations

import asyncio

import pytest

from support.events import parse_events, until
from support.fake_engine import FakeEngine
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio

SAY = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": SAY, "max_tokens": 4, "temperature": 0},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4, "temperature": 0},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
}
OWN = {"id", "created"}  # of each reply


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_is_answered_as_on_its_own_route(path: str) -> None:
    async with connect(make_app()) as client:
        own, invoked = [
            (await client.post(each, json=BODIES[path] | {"model": "fake"})).json() for each in (path, "/invocations")
        ]
    assert {name: own[name] for name in own.keys() - OWN} == {name: invoked[name] for name in invoked.keys() - OWN}


async def test_queries_are_a_score_and_chats_are_streamed() -> None:
    async with connect(make_app()) as client:
        score = await client.post("/invocations", json={"queries": "a", "documents": ["b"]})
        reply = await client.post("/invocations", json=BODIES["/v1/chat/completions"] | {"stream": True})
    assert len(score.json()["data"]) == 1
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert parse_events(reply.text)


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        ({"model": "fake"}, 400, None, "expected a body of /v1/chat/completions, /v1/completions"),
        ({"messages": SAY, "temperature": 3}, 400, "temperature", "less than or equal to 2"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0]", "needs a content"),
        ({"prompt": "a", "model": "other"}, 404, "model", "other"),
    ],
)
async def test_what_is_wrong_is_named_as_there(body: dict[str, object], status: int, param: str, text: str) -> None:
    async with connect(make_app()) as client:
        reply = await client.post("/invocations", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert text in error["message"]


async def test_an_invocation_needs_the_key_and_the_probes_do_not() -> None:
    async with connect(make_app(api_key=("secret-of-the-client",))) as client:
        assert (await client.post("/invocations", json=BODIES["/v1/completions"])).status_code == 401
        for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/load")):
            assert (await client.request(method, path)).status_code == 200


async def test_ping_is_the_readiness() -> None:
    state = make_state()
    async with connect(make_app(state)) as client:
        for method in ("GET", "POST"):
            assert (await client.request(method, "/ping")).json() == {"status": "ready"}
        state.draining = True
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
