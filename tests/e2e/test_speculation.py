"""Guessed tokens over HTTP: every sampling field has the answers that it has without them, over a killed engine too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.served import Served
from e2e.streams import client, over_kills, stream

pytestmark = pytest.mark.e2e

PROMPT = "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 4, "maxItems": 8}},
    "required": ["a"],
    "additionalProperties": False,
}
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_p": 0.8},
    {"temperature": 1.0, "seed": 3, "top_k": 5},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"60": 4}},
    {"min_tokens": 30},
    {"ignore_eos": True},
    {"stop": [" 4"]},
    {"stop": ["3, 4, 1"], "include_stop_str_in_output": True},
    {"stop_token_ids": [66]},
    {"n": 3, "temperature": 0.9, "seed": 5},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"allowed_token_ids": [60, 61, 62, 63, 64, 65, 66, 67]},
    {"bad_words": ["3"]},
    {"echo": True},
    {"use_beam_search": True, "n": 2},
    {"guided_json": SCHEMA},
    {"guided_regex": "(12|21){4,9}"},
    {"guided_choice": ["one two one two", "one two two two"]},
    {"response_format": {"type": "json_object"}, "temperature": 0.8, "seed": 6},
    {"truncate_prompt_tokens": 9},
    {"return_token_ids": True},
    {"cache_salt": "a"},
    {"timeout": 60},
)
CHAT_FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 1, "logprobs": True, "top_logprobs": 2},
    {"max_reasoning_tokens": 4},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
        "tool_choice": "required",
    },
)


def bodies() -> list[tuple[str, dict[str, Any]]]:
    plain: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0}
    turns = [{"role": "user", "content": f"Say again: {PROMPT}"}]
    return [
        *[("/v1/completions", {**plain, "prompt": PROMPT, **fields}) for fields in FIELDS],
        *[("/v1/chat/completions", {**plain, "messages": turns, **fields}) for fields in CHAT_FIELDS],
    ]


async def answers(server: Served, **more: object) -> list[tuple[int, Any]]:
    """All bodies, eight at once: the statuses and the choices."""
    seats = asyncio.Semaphore(8)

    async def ask(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with seats:
            reply = await http.post(server.url + path, json={**body, **more})
            choices = reply.json().get("choices")
            for choice in choices or []:
                for call in choice.get("message", {}).get("tool_calls") or []:
                    del call["id"]  # a random one
            return reply.status_code, choices

    async with httpx.AsyncClient(timeout=120) as http:
        return await asyncio.gather(*(ask(path, body) for path, body in bodies()))


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, Any]]:
    """The answers of a server that does not guess."""
    with Served() as off:
        found = asyncio.run(answers(off))
        for (path, body), (status, choices) in zip(bodies(), found, strict=True):
            assert status == 200, (path, body, choices)
        assert off.metric("quire_spec_decode_draft_tokens_total") == 0
        off.wait_idle()
    return found


@pytest.fixture(scope="module")
def suffix() -> Iterator[Served]:
    with Served("--speculation", "suffix", "--max-model-len", "1024") as started:
        yield started


VLLM_CONFIG = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}'


@pytest.mark.parametrize("asked", [("--speculative-config", VLLM_CONFIG), ("--speculation", "outputs")], ids=str)
def test_every_field_has_the_answers_that_it_has_without_guesses(expected: Any, asked: tuple[str, str]) -> None:
    """With earlier outputs, the second round guesses from the first."""
    with Served(*asked) as on:
        for _ in range(1 + (asked[1] == "outputs")):
            assert asyncio.run(answers(on)) == expected
        assert on.metric("quire_spec_decode_draft_tokens_total") > 100
        assert on.metric("quire_spec_decode_accepted_tokens_total") > 50
        guessed = on.metric("quire_spec_decode_draft_tokens_total")
        assert asyncio.run(answers(on, speculation=False)) == expected
        assert on.metric("quire_spec_decode_draft_tokens_total") == guessed
        on.wait_idle()


def test_outputs_of_one_key_are_no_source_for_another() -> None:
    """Drawn text, which does not repeat itself: only an answer that was noted tells its tokens."""
    body = {"prompt": "One of many, and ", "max_tokens": 120, "temperature": 2.0, "seed": 5, "ignore_eos": True}
    accepted, texts = [], []
    with Served("--speculation", "outputs", "--api-key", "first=key-of-first", "second=key-of-second") as server:
        for key, more in (("first", {}), ("first", {}), ("second", {}), ("first", {"cache_salt": "a"})):
            before = server.metric("quire_spec_decode_accepted_tokens_total")
            auth = {"Authorization": f"Bearer key-of-{key}"}
            reply = httpx.post(f"{server.url}/v1/completions", json=body | more, headers=auth, timeout=60)
            assert reply.status_code == 200, reply.text
            texts.append(reply.json()["choices"][0]["text"])
            server.wait_idle()
            accepted.append(server.metric("quire_spec_decode_accepted_tokens_total") - before)
    assert len(set(texts)) == 1
    assert accepted[1] > 2 * max(accepted[0], accepted[2], accepted[3]) + 20, accepted


def test_a_prediction_is_a_source_of_guesses_and_counted(suffix: Served) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    body: dict[str, Any] = {"messages": turns, "temperature": 0, "max_tokens": 40}
    path = suffix.url + "/v1/chat/completions"
    plain = httpx.post(path, json=body).json()
    content = plain["choices"][0]["message"]["content"]
    assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]
    for prediction in (content, [{"type": "text", "text": content}]):
        told = httpx.post(path, json=body | {"prediction": {"type": "content", "content": prediction}}).json()
        assert told["choices"] == plain["choices"]
        assert told["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    wrong = httpx.post(path, json=body | {"prediction": {"type": "content", "content": "?" * 200}}).json()
    assert wrong["choices"] == plain["choices"]
    assert wrong["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    refused = httpx.post(path, json=body | {"prediction": {"type": "other", "content": ""}})
    assert refused.status_code == 400


def test_a_kill_under_guesses_changes_no_stream(suffix: Served) -> None:
    asyncio.run(kill_under_guesses(suffix))


@pytest.mark.matrix  # a draft model's pool over preemptions: tests/model/test_speculation.py
def test_a_kill_under_a_draft_models_guesses_changes_no_stream() -> None:
    with Served("--speculation", "model:quire-demo", "--max-model-len", "1024") as server:
        asyncio.run(kill_under_guesses(server))


async def kill_under_guesses(server: Served) -> None:
    wanted = [
        {
            "prompt": f"{PROMPT}{' 3,' * (number % 3)}",
            "max_tokens": 300,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "temperature": 0.0 if number % 2 else 0.6,
            "seed": number,
            "presence_penalty": 0.1 * (number % 4 == 1),
        }
        for number in range(8)
    ]
    async with client(server.url) as http:
        alone = await asyncio.gather(*(stream(http, request | {"speculation": False}) for request in wanted))
        for one, other in zip(alone, await over_kills(server, http, wanted, [40]), strict=True):
            assert other.errors == []
            assert (other.token_ids, other.logprobs, other.text) == (one.token_ids, one.logprobs, one.text)
    assert server.metric("quire_engine_restarts_total") == 1
    server.wait_idle()


# The tokens of a draft model: tests/model/test_speculation.py. What vLLM's flags are in ours is told in unit tests.
@pytest.mark.matrix
@pytest.mark.parametrize(
    "flags",
    [
        ("--speculation", "model:quire-demo"),
        ("--speculative-config", '{"model": "quire-demo", "num_speculative_tokens": 3}'),
        ("--spec-method", "draft_model", "--spec-model", "quire-demo"),
    ],
)
def test_a_draft_model_has_the_answers_without_guesses(expected: Any, flags: tuple[str, ...]) -> None:
    with Served(*flags) as on:
        assert asyncio.run(answers(on)) == expected
        assert on.metric("quire_spec_decode_draft_tokens_total") > 0
        assert on.metric("quire_spec_decode_accepted_tokens_total") > 0
        on.wait_idle()
