"""`use_beam_search`: what the engine is asked for, what comes back, and what cannot be combined with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire_engine.contract.types import BeamParams
from support.completing import GREEDY, run
from support.fake_engine import FakeEngine
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
TEXTS = (b"aa", b"b", b"ccc", b"d")
SEARCH: dict[str, Any] = {"use_beam_search": True, "max_tokens": 8}


def engine() -> FakeEngine:
    return FakeEngine(replies=lambda request, choice: (*TEXTS[choice], 257))


@pytest.mark.parametrize(
    ("fields", "beam", "n"),
    [
        ({}, BeamParams(width=1), 1),
        ({"n": 3}, BeamParams(width=3), 3),
        ({"n": 2, "best_of": 4}, BeamParams(width=4), 2),
        ({"n": 2, "beam_width": 4}, BeamParams(width=4), 2),
        ({"n": 2, "beam_width": 4, "best_of": 4}, BeamParams(width=4), 2),
        ({"n": 2, "best_of": 2, "length_penalty": 0.5}, BeamParams(width=2, length_penalty=0.5), 2),
        (
            {"length_penalty": 0, "early_stopping": True},
            BeamParams(width=1, length_penalty=0.0, early_stopping=True),
            1,
        ),
        ({"beam_width": 2, "early_stopping": "never"}, BeamParams(width=2, early_stopping="never"), 1),
        ({"temperature": 1, "top_p": 1, "top_k": -1, "seed": 5, "min_tokens": 2}, BeamParams(width=1), 1),
    ],
)
async def test_what_the_engine_is_asked_for(fields, beam, n):
    asked = engine()
    reply = await run(asked, **SEARCH, **fields)
    assert (asked.submitted[0].beam, asked.submitted[0].n) == (beam, n)
    assert asked.submitted[0].num_sequences == beam.width
    assert [choice["text"] for choice in reply["choices"]] == [text.decode() for text in TEXTS[:n]]
    assert [choice["beam_score"] for choice in reply["choices"]] == [-0.5 * (choice + 1) for choice in range(n)]


async def test_the_usage_counts_what_is_returned():
    reply = await run(engine(), **SEARCH, n=2, best_of=4)
    assert reply["usage"]["completion_tokens"] == len(TEXTS[0]) + len(TEXTS[1]) + 2


async def test_without_a_search_nothing_is_scored():
    reply = await run(engine(), max_tokens=8)
    assert "beam_score" not in reply["choices"][0]


async def test_chats_are_searched_too():
    asked = engine()
    async with connect(make_app(engine=asked)) as client:
        body = CHAT | SEARCH | {"n": 2, "beam_width": 3}
        reply = (await client.post("/v1/chat/completions", json=body)).json()
    assert asked.submitted[0].beam == BeamParams(width=3)
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["aa", "b"]
    assert [choice["beam_score"] for choice in reply["choices"]] == [-0.5, -1.0]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", GREEDY), ("/v1/chat/completions", CHAT)])
async def test_a_stream_tells_at_the_end(path, body):
    """By one frame a choice where, as from the real engine, each comes whole."""
    asked = engine()
    asked.tokens_per_step = 8
    fields = SEARCH | {"n": 2, "beam_width": 3, "stream": True, "stream_options": {"include_usage": True}}
    async with connect(make_app(engine=asked)) as client:
        reply = await client.post(path, json=body | fields)
    frames = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    ended = [choice for frame in frames for choice in frame["choices"] if choice["finish_reason"]]
    assert [(choice["index"], choice["beam_score"]) for choice in ended] == [(0, -0.5), (1, -1.0)]
    assert [choice.get("text") or choice["delta"]["content"] for choice in ended] == ["aa", "b"]
    assert frames[-1]["usage"]["completion_tokens"] == 5
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temperature", {"temperature": 0.5}),
        ("top_p", {"top_p": 0.9}),
        ("top_k", {"top_k": 5}),
        ("min_p", {"min_p": 0.1}),
        ("presence_penalty", {"presence_penalty": 0.1}),
        ("frequency_penalty", {"frequency_penalty": 0.1}),
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("logit_bias", {"logit_bias": {"97": 1}}),
        ("allowed_token_ids", {"allowed_token_ids": [97]}),
        ("bad_words", {"bad_words": ["a"]}),
        ("stop", {"stop": "a"}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("guided_regex", {"guided_regex": "a+"}),
        ("beam_width", {"n": 3, "beam_width": 2}),
        ("beam_width", {"beam_width": 0}),
        ("beam_width", {"beam_width": 17}),
        ("length_penalty", {"length_penalty": 11}),
        ("early_stopping", {"early_stopping": "soon"}),
        ("beam_width", {"use_beam_search": False, "beam_width": 2}),
        ("length_penalty", {"use_beam_search": None, "length_penalty": 2}),
        ("early_stopping", {"use_beam_search": None, "early_stopping": True}),
    ],
)
async def test_what_is_refused_by_name(path, param, fields):
    body = (GREEDY if path == "/v1/completions" else CHAT) | SEARCH | fields
    asked = engine()
    async with connect(make_app(engine=asked)) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(param)
    assert not asked.submitted


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("best_of", {"n": 3, "best_of": 2}),
        ("beam_width", {"best_of": 3, "beam_width": 2}),
        ("beam_width", {"prompt": ["a"] * 5, "beam_width": 13}),
        ("max_tokens", {"max_tokens": 0, "echo": True}),
    ],
)
async def test_what_completions_refuse(param, fields):
    async with connect(make_app()) as client:
        reply = await client.post("/v1/completions", json=GREEDY | SEARCH | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_tool_that_must_be_called_is_refused_and_one_that_may_be_is_not():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with connect(make_app()) as client:
        body = CHAT | SEARCH | {"tools": [tool]}
        free = await client.post("/v1/chat/completions", json=body)
        forced = await client.post("/v1/chat/completions", json=body | {"tool_choice": "required"})
    assert free.status_code == 200, free.text
    assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tools")


async def test_every_beam_needs_a_place_in_the_queue_and_room_in_the_pool():
    async with connect(make_app(max_queued_sequences=4)) as client:
        assert (await client.post("/v1/completions", json=GREEDY | SEARCH | {"beam_width": 4})).status_code == 200
        assert (await client.post("/v1/completions", json=GREEDY | SEARCH | {"beam_width": 5})).status_code == 429
    async with connect(make_app()) as client:
        large = GREEDY | {"max_tokens": 400}
        assert (await client.post("/v1/completions", json=large)).status_code == 200
        reply = await client.post("/v1/completions", json=large | {"use_beam_search": True, "beam_width": 16})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")
        assert "16 x 400 new tokens" in reply.json()["error"]["message"]
