"""Errors of /v1/messages: Anthropic's envelope wherever they are made, before and after a stream's first event."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from quire_server.errors import BadRequest, ContextLengthExceeded, EngineFailed, NotReady, QueueFull
from quire_server.http.envelopes import anthropic_body
from support.events import until
from support.fake_engine import FakeEngine
from support.fakes import connect, make_app, make_state
from support.messages import ASK, PATH, Model, parse_events

pytestmark = pytest.mark.anyio

COUNT = f"{PATH}/count_tokens"
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
TOOL = {"name": "f", "input_schema": {}}


def check(reply: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's envelope."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert set(body["error"]) == {"type", "message", "details"}
    assert set(body["error"]["details"]) == {"error_code"}
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return str(body["error"]["message"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": 1}]}]}, "a content block"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "type 'image' are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "type 'document' are not"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "no 'tool_use' block with the id 'a'"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "'user' cannot have a block of the type 'tool_use'"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "cannot have a block of the type 'tool_result'"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": [USE]}]}, "must have their results"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [USE]},
                    {"role": "user", "content": [{**RESULT, "content": [IMAGE]}]},
                ]
            },
            "type 'image' are not supported",
        ),
        ({"system": [IMAGE]}, "type 'image' are not supported"),
        ({"system": 1}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "type 'web_search_20250305' are not"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f f", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "Two tools have the name 'f'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "'g', which is not in 'tools'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a 'name'"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice' needs 'tools'"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "needs 'budget_tokens'"),
        ({"thinking": {"type": "between_tools"}}, "type 'between_tools' is not supported"),
        ({"container": "c"}, "'container' is not supported"),
        ({"mcp_servers": [{"type": "url"}]}, "'mcp_servers' is not supported"),
        ({"compaction": {"type": "summarize"}}, "'compaction' is not supported"),
        ({"thread": {"type": "create"}}, "'thread' is not supported"),
        ({"output_format": {"type": "text"}}, "output_format"),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], said: str) -> None:
    async with connect(make_app()) as client:
        for path in (PATH, COUNT):
            assert said in check(await client.post(path, json=ASK | fields), 400, "invalid_request_error")


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"max_tokens": None}, {"temperature": 3}, {"top_p": 0}])
async def test_ranges(fields: dict[str, Any]) -> None:
    async with connect(make_app()) as client:
        assert next(iter(fields)) in check(await client.post(PATH, json=ASK | fields), 400, "invalid_request_error")
        without = {name: value for name, value in ASK.items() if name not in fields}
        if "max_tokens" in fields:
            check(await client.post(PATH, json=without), 400, "invalid_request_error")


async def test_errors_that_no_route_has_made() -> None:
    app = make_app(api_key=("key",), max_body_bytes=2000, max_header_bytes=3000)
    key = {"authorization": "Bearer key"}
    async with connect(app) as client:
        for path in (PATH, COUNT):
            check(await client.post(path, json=ASK), 401, "authentication_error")
            check(await client.post(path, json=ASK, headers={"a": "b" * 4000}), 431, "invalid_request_error")
            check(await client.post(path, content="x" * 3000, headers=key), 413, "request_too_large")
            check(await client.post(path, content="{}", headers=key), 415, "invalid_request_error")
            check(await client.get(path, headers=key), 405, "invalid_request_error")
            reply = await client.post(path, json=ASK | {"model": "claude-x"}, headers=key)
            assert "'claude-x' does not exist" in check(reply, 404, "not_found_error")
        check(await client.post(f"{PATH}/batches", json={}, headers=key), 404, "not_found_error")
        for path in ("/v1/messages-x", "/v1/messagesx", "/v1/models/nothing"):
            assert set((await client.get(path, headers=key)).json()["error"]) == {"message", "type", "param", "code"}


async def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    async with connect(make_app(api_key=("key",))) as client:
        assert (await client.post(PATH, json=ASK, headers={"x-api-key": "key"})).status_code == 200
        check(await client.post(PATH, json=ASK, headers={"x-api-key": "other"}), 401, "authentication_error")


async def test_a_proxys_root_does_not_hide_the_path() -> None:
    async with connect(make_app(root_path="/llm")) as client:
        for path in (PATH, f"/llm{PATH}"):
            assert (await client.post(path, json=ASK)).status_code == 200
            check(await client.post(path, json={}), 400, "invalid_request_error")
        assert "type" not in (await client.get(f"/llm{PATH}-x")).json()


async def test_an_unexpected_exception_has_the_envelope() -> None:
    state = make_state()
    app = make_app(state)
    state.client = None  # type: ignore[assignment]
    async with connect(app) as client:
        assert "internal error" in check(await client.post(PATH, json=ASK), 500, "api_error")


async def test_a_full_queue_and_a_draining_server() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=1)
    async with connect(make_app(state)) as client:
        engine.hold()
        first = asyncio.create_task(client.post(PATH, json=ASK))
        await until(lambda: bool(engine.live))
        for fields in ({}, {"stream": True}):
            reply = await client.post(PATH, json=ASK | fields)
            check(reply, 429, "rate_limit_error")
            assert int(reply.headers["retry-after"]) >= 1
        engine.release()
        assert (await first).status_code == 200
        state.phase.draining = True
        reply = await client.post(PATH, json=ASK)
        check(reply, 503, "overloaded_error")
        assert int(reply.headers["retry-after"]) >= 1


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know() -> None:
    long = [{"role": "user", "content": "x" * 200}]
    async with connect(make_app(max_model_len=100)) as client:
        message = check(await client.post(PATH, json=ASK | {"messages": long}), 400, "invalid_request_error")
        assert message.startswith("prompt is too long: ")
        counted = await client.post(COUNT, json={"messages": long})
        assert counted.json()["input_tokens"] > 200


async def test_an_early_failure_is_a_status() -> None:
    async with connect(make_app(engine=FakeEngine(fail_after=0))) as client:
        for fields in ({}, {"stream": True}):
            assert check(await client.post(PATH, json=ASK | fields), 500, "api_error") == "the step failed"


async def test_a_later_failure_is_an_event() -> None:
    async with connect(make_app(engine=FakeEngine(fail_after=3, error="bad luck"))) as client:
        reply = await client.post(PATH, json=ASK | {"stream": True})
    events = parse_events(reply.text)
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "bad luck", "details": {"error_code": "engine_error"}},
        "request_id": reply.headers["request-id"],
    }
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]


async def test_a_message_that_was_aborted_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("four")
    advance = model.engine._advance

    def aborted(live: Any) -> list[Any]:
        outputs = advance(live)
        from dataclasses import replace

        return [replace(output, finish="abort") if live.num_tokens[0] == 3 else output for output in outputs]

    monkeypatch.setattr(model.engine, "_advance", aborted)
    async with model.connected() as client:
        check(await client.post(PATH, json=ASK), 503, "overloaded_error")
        reply = await client.post(PATH, json=ASK | {"stream": True})
    assert parse_events(reply.text)[-1]["error"]["type"] == "overloaded_error"


async def test_the_sdks_loops_are_told_to_send_the_whole_conversation() -> None:
    async with connect(make_app()) as client:
        reply = await client.post(PATH, json=ASK | {"thread": {"type": "create"}})
        assert reply.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
        assert (await client.post(PATH, json=ASK | {"thread": None})).status_code == 200


def test_types_by_status() -> None:
    found = [
        anthropic_body(error, "id")["error"]["type"]
        for error in (
            BadRequest("x"),
            ContextLengthExceeded("x"),
            QueueFull(retry_after_seconds=1),
            NotReady(),
            EngineFailed("x"),
        )
    ]
    assert found == ["invalid_request_error"] * 2 + ["rate_limit_error", "overloaded_error", "api_error"]
