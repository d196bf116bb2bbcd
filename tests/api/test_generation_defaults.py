"""The model's own defaults in every dialect: what a request leaves out is the model's, what it brings is its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire_engine.contract.types import GenerationRequest
from quire_server.state import ServerState
from quire_server.text.generation_config import GenerationDefaults
from support.covering import few
from support.fake_engine import FakeEngine
from support.fakes import MODEL, connect, make_app, make_state
from support.fim_tokenizers import fim_state

pytestmark = pytest.mark.anyio

NUMBERS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
DEFAULTS = GenerationDefaults(sampling=NUMBERS, max_tokens=7, source="generation_config.json")
SAY = [{"role": "user", "content": "hi"}]
DIALECTS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": SAY},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": SAY, "max_tokens": 5},
}


async def submitted(
    path: str, defaults: GenerationDefaults = DEFAULTS, state: ServerState | None = None, **fields: object
) -> GenerationRequest:
    """The engine's request for one of a client."""
    if state is None:
        state = make_state()
    state.model_text, engine = replace(state.model_text, defaults=defaults), state.client._port  # the fake
    async with connect(make_app(state)) as client:
        reply = await client.post(path, json=DIALECTS.get(path, {}) | fields)
    assert reply.status_code == 200, reply.text
    (request,) = engine.submitted  # type: ignore[attr-defined]
    return request


def numbers(request: GenerationRequest) -> dict[str, float]:
    return {name: getattr(request.sampling, name) for name in NUMBERS}


@pytest.mark.parametrize("path", DIALECTS)
async def test_what_a_request_leaves_out_is_the_models(path: str) -> None:
    assert numbers(await submitted(path)) == NUMBERS


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_requests_own_value_wins_at_openais_default_too(path: str) -> None:
    request = await submitted(path, temperature=1, top_p=1, top_k=-1)
    assert numbers(request) == NUMBERS | {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@pytest.mark.parametrize("path", DIALECTS)
async def test_null_is_left_out_and_zero_is_greedy(path: str) -> None:
    request = await submitted(path, temperature=0, top_p=None)
    assert request.sampling.is_greedy
    assert request.sampling.top_p == 0.95


@pytest.mark.parametrize("path", DIALECTS)
async def test_without_defaults_they_are_openais(path: str) -> None:
    request = await submitted(path, GenerationDefaults())
    assert list(numbers(request).values()) == [1.0, 1.0, 0, 0.0, 1.0]


@pytest.mark.parametrize(
    "defaults", few([GenerationDefaults(), DEFAULTS], DEFAULTS), ids=["the dialect's", "the model's"]
)
async def test_the_document_shows_the_defaults_that_hold(defaults: GenerationDefaults) -> None:
    state = make_state()
    state.model_text = replace(state.model_text, defaults=defaults)
    schemas = make_app(state).openapi()["components"]["schemas"]
    bodies = {
        "CompletionRequest": "/v1/completions",
        "ChatCompletionRequest": "/v1/chat/completions",
        "ResponseRequest": "/v1/responses",
        "MessageRequest": "/v1/messages",
        "ModelOptions": "/api/chat",
    }
    for schema, path in bodies.items():
        body = {"model": MODEL, "messages": SAY} if path == "/api/chat" else {}
        holds = numbers(await submitted(path, defaults, **body))
        fields = schemas[schema]["properties"]
        if path == "/api/chat":
            fields["repetition_penalty"] = fields["repeat_penalty"]
        assert {name: fields[name]["default"] for name in NUMBERS} == holds, schema


async def test_the_models_limit_holds_where_neither_request_nor_dialect_has_one() -> None:
    limits = {path: (await submitted(path)).stop.max_new_tokens for path in DIALECTS}
    assert limits == {
        "/v1/completions": 16,
        "/v1/chat/completions": 7,
        "/v1/responses": 7,
        "/v1/messages": 5,
    }
    assert (await submitted("/v1/chat/completions", max_tokens=30)).stop.max_new_tokens == 30


async def test_the_operators_limit_holds_for_all() -> None:
    limited = replace(DEFAULTS, most_tokens=7)
    for path in DIALECTS:
        assert (await submitted(path, limited)).stop.max_new_tokens == min(7, 5 if path == "/v1/messages" else 7)
    state = make_state()
    state.model_text = replace(state.model_text, defaults=limited)
    async with connect(make_app(state)) as client:
        reply = await client.post("/v1/chat/completions", json={"messages": SAY, "max_tokens": 30})
    assert reply.headers["x-quire-clamped"] == "max_tokens=7"


async def test_llama_servers_defaults_of_infill_come_after_the_models(tmp_path: Path) -> None:
    text: dict[str, Any] = {"input_prefix": "a", "input_suffix": "b", "top_k": 3}
    one = replace(DEFAULTS, sampling={"temperature": 0.6, "top_k": 20})
    request = await submitted("/infill", one, fim_state(tmp_path, FakeEngine()), **text)
    assert numbers(request) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 3,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
    }


async def test_beams_are_ranked_by_the_model_alone() -> None:
    request = await submitted("/v1/completions", use_beam_search=True, n=2)
    assert request.beam is not None
    assert list(numbers(request).values()) == [1.0, 1.0, 0, 0.0, 1.0]


async def test_clients_see_them() -> None:
    state = make_state()
    state.model_text = replace(state.model_text, defaults=DEFAULTS)
    async with connect(make_app(state)) as client:
        (model, _) = (await client.get("/v1/models")).json()["data"]
        reply = (await client.post("/v1/responses", json={"input": "hi"})).json()
    assert model["default_sampling_params"] == NUMBERS | {"max_tokens": 7}
    assert (reply["temperature"], reply["top_p"]) == (0.6, 0.95)
