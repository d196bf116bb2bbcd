"""POST /v1/completions: parameters on their way to the engine, seeds, ids, names, and what replies report."""

from __future__ import annotations

import pytest

from support.completing import FOX, GREEDY, complete, run
from support.fake_engine import FakeEngine
from support.fake_tokenizer import EOS
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio


async def test_every_parameter_reaches_the_engine() -> None:
    engine = FakeEngine()
    await run(
        engine,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-3,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"5": 1, "259": -100},
        allowed_token_ids=[1, 2, 3, 2],
        bad_words=["a"],
        min_tokens=2,
        max_tokens=4,
        stop_token_ids=[9],
        cache_salt="tenant-1",
        logprobs=3,
        n=2,
    )
    [request] = engine.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert sampling.seed == -3
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.25, -0.5, 1.5)
    assert sampling.logit_bias == ((5, 1.0), (259, -100.0))
    assert sampling.allowed_token_ids == (1, 2, 3)
    assert sampling.banned_token_ids == (97,)
    assert (sampling.min_tokens, sampling.num_logprobs, sampling.num_prompt_logprobs) == (2, 3, None)
    assert request.stop.max_new_tokens == 4
    assert request.stop.stop_token_ids == (9, EOS, 259)
    assert (request.n, request.cache_salt) == (2, "tenant-1")


@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-12, 0.0])
async def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    engine = FakeEngine()
    await run(engine, temperature=temperature, max_tokens=1)
    assert engine.submitted[0].sampling.temperature == 0.0


async def test_null_is_the_default_everywhere() -> None:
    from quire_server.dialects.completions.wire import CompletionRequest

    engine = FakeEngine()
    nulls = dict.fromkeys(name for name in CompletionRequest.model_fields if name not in {"prompt", "temperature"})
    assert (await run(engine, **nulls))["choices"][0]["text"] == FOX[:16]


async def test_unseeded_prompts_get_seeds_of_their_own() -> None:
    engine = FakeEngine()
    await run(engine, prompt=["a", "a"], temperature=1, max_tokens=1)
    seeds = [request.sampling.seed for request in engine.submitted]
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_a_server_seed_makes_unseeded_requests_repeatable() -> None:
    async def seeds(server_seed: int) -> list[int]:
        engine = FakeEngine()
        await run(engine, {"seed": server_seed}, prompt=["a", "b", "a"], temperature=1, max_tokens=1)
        return [request.sampling.seed for request in engine.submitted]

    first = await seeds(7)
    assert first == await seeds(7)
    assert first[0] == first[2] != first[1]
    assert first != await seeds(8)


async def test_internal_ids_are_random() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        replies = [await complete(client, request_id="mine", max_tokens=1) for _ in range(2)]
    assert [reply["id"] for reply in replies] == ["cmpl-mine", "cmpl-mine"]
    assert len({request.request_id for request in engine.submitted} - {"mine", "cmpl-mine"}) == 2


async def test_the_id_is_that_of_the_request() -> None:
    async with connect(make_app()) as client:
        reply = await client.post("/v1/completions", json=GREEDY, headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert reply.json()["id"] == "cmpl-abc-1"


async def test_any_served_name_or_none() -> None:
    async with connect(make_app()) as client:
        assert (await complete(client, model="alias"))["model"] == "alias"
        assert (await complete(client, model=None))["model"] == "fake"


# -- what replies tell


async def test_fields_without_effect_are_reported() -> None:
    async with connect(make_app()) as client:
        body = GREEDY | {"user": "me", "store": True, "n_predict": 5, "priority": 3, "metadata": None, "a b\n": 1}
        reply = await client.post("/v1/completions", json=body)
        assert reply.headers["x-quire-ignored"] == "user, store, n_predict, ?, priority"
        body = GREEDY | {"store": False, "service_tier": "auto", "priority": 0, "parallel_tool_calls": True}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200
        assert "x-quire-ignored" not in reply.headers
        reply = await client.post("/v1/completions", json=GREEDY | {f"x{i}": 1 for i in range(100)})
        assert reply.headers["x-quire-ignored"].endswith("x15, and 84 more")


async def test_what_was_lowered_is_reported() -> None:
    async with connect(make_app(max_model_len=32)) as client:
        reply = await client.post("/v1/completions", json=GREEDY | {"max_tokens": 1000, "prompt": ["x" * 20, "y"]})
        assert reply.headers["x-quire-clamped"] == "max_tokens=12"
        assert [len(c["text"]) for c in reply.json()["choices"]] == [12, 31]
        assert "x-quire-clamped" not in (await client.post("/v1/completions", json=GREEDY)).headers


async def test_off_values_of_unsupported_fields_pass() -> None:
    fields = {
        "suffix": None,
        "use_beam_search": False,
        "response_format": {"type": "text"},
        "guided_json": None,
        "length_penalty": 1.0,
        "modalities": ["text"],
        "top_k": -1,
    }
    assert (await run(max_tokens=1, **fields))["choices"][0]["text"] == "T"
