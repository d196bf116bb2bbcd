"""`x-quire-route`: an operator who asks learns which replica answers and why; nobody else does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import httpx
import pytest

from quire_server.engine.replica_routing import RouteTaken
from quire_server.engine.replicas import ReplicaSet
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio

ASK = {"x-quire-explain": "route"}
BODY = {"prompt": ["a", "b"], "max_tokens": 1}


class Routes:
    """What is read of a `ReplicaSet` here: each request has moved once."""

    def routes(self, request_id: str) -> Sequence[RouteTaken]:
        def taken(replica: str, reason: str) -> RouteTaken:
            return RouteTaken(replica=replica, reason=reason, why="predicted 0.050 s", predicted=0.05, sent_at=1.0)

        return [taken("0", "load"), taken("1", "moved")]


async def complete(headers: dict[str, str], *, replicas: bool = True, **settings: Any) -> httpx.Response:
    state = make_state(**settings)
    if replicas:
        state.replicas = cast(ReplicaSet, Routes())
    async with connect(make_app(state), headers={"host": "localhost"}) as client:
        reply = await client.post("/v1/completions", json=BODY, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply


async def test_an_operator_who_asks_is_told_the_last_route_of_each_prompt() -> None:
    reply = await complete(ASK)
    assert reply.headers["x-quire-route"] == "; ".join(["replica 1 (moved): predicted 0.050 s"] * 2)


async def test_streams_have_it_too() -> None:
    state = make_state()
    state.replicas = cast(ReplicaSet, Routes())
    async with connect(make_app(state), headers={"host": "localhost"}) as client:
        reply = await client.post("/v1/completions", json={**BODY, "prompt": "a", "stream": True}, headers=ASK)
        assert reply.headers["x-quire-route"] == "replica 1 (moved): predicted 0.050 s"


@pytest.mark.parametrize(
    ("headers", "settings"),
    [
        ({}, {}),
        ({"x-quire-explain": "all"}, {}),
        (ASK | {"x-forwarded-for": "10.0.0.1"}, {}),
        (ASK | {"authorization": "Bearer ordinary"}, {"api_key": ("ordinary",)}),
        (ASK | {"authorization": "Bearer ordinary"}, {"api_key": ("ordinary",), "admin_api_key": ("operator",)}),
    ],
    ids=["not asked", "another word", "a proxy", "no admin key set", "a client's key"],
)
async def test_nobody_else_is_told(headers: dict[str, str], settings: dict[str, Any]) -> None:
    assert "x-quire-route" not in (await complete(headers, **settings)).headers


async def test_the_admin_key_comes_beside_the_clients() -> None:
    keys = {"authorization": "Bearer ordinary", "x-api-key": "operator"}
    reply = await complete(ASK | keys, api_key=("ordinary",), admin_api_key=("operator",))
    assert reply.headers["x-quire-route"].startswith("replica 1 (moved)")


async def test_a_single_engine_has_no_routes() -> None:
    assert "x-quire-route" not in (await complete(ASK, replicas=False)).headers
