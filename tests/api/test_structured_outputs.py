"""Structured output from the request's field to what the engine is told, through the real check of grammars."""

from __future__ import annotations

import pytest

from support.fake_engine import FakeEngine
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine_and_client(anyio_backend: str):
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        yield engine, client


@pytest.mark.parametrize("path", BODIES)
async def test_the_engine_is_told(engine_and_client, path: str):
    engine, client = engine_and_client
    for fields, words in (
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "/\\x22a\\x22"),
        ({"response_format": {"type": "json_object"}}, "%lark"),
        ({"guided_choice": ["yes", "no"]}, '"yes" | "no"'),
        ({"ebnf": 'root ::= "a"'}, '"a"'),
        ({"response_format": {"type": "text"}}, ""),
    ):
        reply = await client.post(path, json=BODIES[path] | fields)
        assert reply.status_code == 200, reply.text
        assert "x-quire-ignored" not in reply.headers
        grammar = engine.submitted[-1].sampling.grammar
        assert words in grammar
        assert bool(words) == bool(grammar)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("param", "value", "words"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}, "uniqueItems"),
        ("guided_json", "{", "not JSON"),
        ("guided_regex", "(?=a)b", "look-around"),
        ("guided_grammar", "hello", "neither a rule"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_before_the_engine(
    engine_and_client, path: str, param: str, value: object, words: str
):
    engine, client = engine_and_client
    submitted = len(engine.submitted)
    reply = await client.post(path, json=BODIES[path] | {param: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]
    assert len(engine.submitted) == submitted


async def test_calls_that_are_required_are_bound(engine_and_client):
    engine, client = engine_and_client
    tool = {"type": "function", "function": {"name": "lookup", "parameters": SCHEMA, "strict": True}}
    body = BODIES["/v1/chat/completions"]
    reply = await client.post("/v1/chat/completions", json=body | {"tools": [tool], "tool_choice": "required"})
    assert reply.status_code == 200, reply.text
    assert "lookup" in engine.submitted[-1].sampling.grammar
    reply = await client.post("/v1/chat/completions", json=body | {"tools": [tool], "tool_choice": "none"})
    assert reply.status_code == 200, reply.text
    assert engine.submitted[-1].sampling.grammar == ""
