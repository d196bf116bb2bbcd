"""A server of three models with room for two: every stream as alone, over swaps, kills and orders."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from e2e.served import Served
from several.__main__ import KINDS, RESTARTS, clients, loads, swap_and_back
from several.phases import PHASES, expected_of, run_phase
from several.server import NAMES, order, row, rows, three_models, untruths

pytestmark = pytest.mark.e2e

# `make models-test` takes all phases.
SOME = ("half of a load", pytest.param("it makes way for others", marks=pytest.mark.matrix))


@pytest.fixture(scope="module")
def server():
    with three_models(*RESTARTS, turn=1.0) as served:
        yield served


@pytest.fixture(scope="module")
def expected(server: Served):
    return asyncio.run(expected_of(server, KINDS[:8]))


def test_the_model_field_chooses_in_every_dialect(server: Served, expected):
    del expected  # all models have been loaded once
    listed = httpx.get(server.url + "/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in listed] == list(NAMES)
    assert {model["state"] for model in listed} <= {"loaded", "sleeping", "unloaded", "unloading"}
    words = [{"role": "user", "content": "Hello"}]
    bodies = {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
        "/v1/chat/completions": {"messages": words, "max_tokens": 4},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
        "/v1/messages": {"messages": words, "max_tokens": 4},
        "/api/chat": {"messages": words, "stream": False, "options": {"num_predict": 4}},
        "/v1/embeddings": {"input": "Hello"},
    }
    with httpx.Client(base_url=server.url, timeout=300) as http:
        for path, body in bodies.items():
            reply = http.post(path, json={**body, "model": "beta"})
            assert (reply.status_code, reply.json()["model"]) == (200, "beta"), reply.text
            unknown = http.post(path, json={**body, "model": "delta"})
            assert unknown.status_code == 404, path
            assert "delta" in unknown.text
        tokens = http.post("/tokenize", json={"model": "gamma", "prompt": "Hello"})
        assert tokens.json()["count"] > 0
        assert http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1}).json()["model"] == "alpha"
        text = http.get("/metrics").text
        assert text.count("# TYPE quire_requests_total counter") == 1
        for name in NAMES:
            assert f'quire_requests_total{{model_name="{name}",outcome="length"}}' in text
        assert "process_start_time_seconds" in text


def test_streams_are_held_over_a_swap_and_go_on(server: Served, expected):
    same, held = asyncio.run(swap_and_back(server, expected))
    assert (same, held > 0) == (8, True)


def test_mixed_clients_lose_nothing(server: Served, expected):
    before = loads(server)
    traffic, false = asyncio.run(clients(server, 8, 6.0, expected))
    assert not traffic.wrong
    assert set(traffic.statuses) == {200}
    assert not [*false, *untruths(server)]
    assert loads(server) > before


@pytest.mark.parametrize("phase", SOME)
def test_a_kill_is_a_pause(server: Served, expected, phase: str):
    assert phase in PHASES
    assert not asyncio.run(run_phase(server, phase, expected))


def test_orders_and_keep_alive(server: Served):
    assert order(server, "load", "beta").json()["state"] == "loaded"
    assert order(server, "sleep", "beta").json()["state"] == "sleeping"
    assert order(server, "unload", "beta").json()["state"] == "unloaded"
    assert order(server, "load", "delta").status_code == 404
    with httpx.Client(base_url=server.url, timeout=300) as http:
        assert http.post("/api/generate", json={"model": "beta"}).json()["done_reason"] == "load"
        assert row(server, "beta")["state"] == "loaded"
        assert "beta" in [model["name"] for model in http.get("/api/ps").json()["models"]]
        gone = http.post("/api/generate", json={"model": "beta", "keep_alive": 0})
        assert (gone.json()["done_reason"], gone.headers.get("x-quire-ignored")) == ("unload", None)
        wrong = http.post("/api/generate", json={"model": "beta", "keep_alive": "soon"})
        assert wrong.status_code == 400
    told = next(each for each in rows(server) if each["model"] == "beta")
    assert told["idle_seconds"] == 0
