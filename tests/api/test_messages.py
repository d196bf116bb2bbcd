"""/v1/messages: what the model is told, what comes back whole and streamed, and why it ended."""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_engine import FakeEngine
from support.fake_tokenizer import CHAT_TEMPLATE
from support.fakes import connect, make_app
from support.messages import ASK, PATH, Model, parse_events, streamed, whole

pytestmark = pytest.mark.anyio


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


async def test_a_message() -> None:
    async with Model("Hello, wörld.").connected() as client:
        reply = await client.post(PATH, json=ASK, headers={"x-request-id": "abc"})
        assert reply.json() == {
            "id": "msg_abc",
            "type": "message",
            "role": "assistant",
            "model": "fake",
            "content": [text("Hello, wörld.")],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": len("[user]hi;[assistant]"),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 15,
                "output_tokens_details": {"thinking_tokens": 0},
            },
        }
        assert reply.headers["request-id"] == reply.headers["x-request-id"] == "abc"


@pytest.mark.parametrize(
    ("said", "fields", "content", "stop"),
    [
        ("Hi 🤔.", {}, [text("Hi 🤔.")], ("end_turn", None)),
        ("one two three", {"stop_sequences": ["x", " three"]}, [text("one two")], ("stop_sequence", " three")),
        ("one two three", {"max_tokens": 3}, [text("one")], ("max_tokens", None)),
        ("one", {"max_tokens": 0}, [], ("max_tokens", None)),
        ("", {}, [], ("end_turn", None)),
    ],
)
async def test_a_stream_is_the_whole_message(
    said: str, fields: dict[str, Any], content: list[Any], stop: tuple[str, str | None]
) -> None:
    async with Model(said).connected() as client:
        one = await whole(client, **fields)
        assert (one["content"], (one["stop_reason"], one["stop_sequence"])) == (content, stop)
        other = await streamed(client, **fields)
        assert other.pop("id") != one.pop("id")
        assert other == one


async def test_a_context_that_is_too_short_is_told() -> None:
    async with Model("x" * 600, max_model_len=100).connected() as client:
        reply = await client.post(PATH, json=ASK)
        assert reply.json()["stop_reason"] == "model_context_window_exceeded"
        assert reply.headers["x-quire-clamped"] == "max_tokens=80"
        assert (await whole(client, max_tokens=80))["stop_reason"] == "max_tokens"


async def test_input_tokens_are_those_that_were_not_cached() -> None:
    model = Model("x")
    model.engine.num_cached_tokens = 16
    async with model.connected() as client:
        for usage in ((await whole(client))["usage"], (await streamed(client))["usage"]):
            assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (4, 16)
        counted = await client.post(f"{PATH}/count_tokens", json={name: ASK[name] for name in ("model", "messages")})
        assert counted.json() == {"input_tokens": 20}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"system": "Be brief."}, "[system]Be brief.;[user]hi;[assistant]"),
        ({"system": [text("Be"), text("brief.")]}, "[system]Be\n\nbrief.;[user]hi;[assistant]"),
        ({"system": "x-anthropic-billing-header: cch=1;\nBe."}, "[system]Be.;[user]hi;[assistant]"),
        ({"system": [text("x-anthropic-billing-header: cch=1;"), text("Be.")]}, "[system]Be.;[user]hi;[assistant]"),
        ({"system": ""}, "[user]hi;[assistant]"),
        (
            {"system": "Be", "messages": [{"role": "system", "content": "brief."}, *ASK["messages"]]},
            "[system]Be\n\nbrief.;[user]hi;[assistant]",
        ),
        (
            {"messages": [*ASK["messages"], {"role": "user", "content": [text("you"), text("there")]}]},
            "[user]hi\nyou\nthere;[assistant]",
        ),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "Hel"}]}, "[user]hi;[assistant]Hel"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": []}]}, "[user]hi;[assistant]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "[user]hi;[assistant]<think>\n"),
        ({"thinking": {"type": "adaptive"}}, "[user]hi;[assistant]<think>\n"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "[user]hi;[assistant]"),
        ({"output_config": {"effort": "high"}}, "[user]hi;[assistant]<think>\n"),
    ],
)
async def test_what_the_model_is_told(fields: dict[str, Any], prompt: str) -> None:
    model = Model("ok")
    async with model.connected() as client:
        assert (await whole(client, **fields))["content"][0].get("text", "ok") == "ok"
        assert model.prompt == prompt
        asked = {name: value for name, value in (ASK | fields).items() if name not in ("max_tokens", "temperature")}
        counted = await client.post(f"{PATH}/count_tokens", json=asked)
        assert counted.json() == {"input_tokens": len(prompt)}


async def test_sampling_is_what_was_asked_for() -> None:
    model = Model("ok")
    async with model.connected() as client:
        await whole(client, temperature=0.5, top_p=0.25, top_k=7, seed=3, stop_sequences=["a"])
    request = model.engine.submitted[-1]
    asked = request.sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed) == (0.5, 0.25, 7, 3)
    assert request.stop.max_new_tokens == 300


KEPT, HOUR = {"cache_control": {"type": "ephemeral"}}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0.0),
        (KEPT, 300.0),
        ({"cache_control": None}, 0.0),
        ({"cache_ttl": 20}, 20.0),
        ({"system": [text("a") | HOUR]}, 3600.0),
        ({"messages": [{"role": "user", "content": [text("a") | KEPT, text("b")]}]}, 300.0),
        ({"tools": [{"name": "a", "input_schema": {"type": "object"}, **HOUR}], **KEPT}, 3600.0),
    ],
)
async def test_a_marked_prompt_is_kept_for_its_time(fields: dict[str, Any], seconds: float) -> None:
    model = Model("ok")
    async with model.connected() as client:
        await whole(client, **fields)
    assert model.engine.submitted[-1].cache_ttl == seconds


@pytest.mark.parametrize(
    "control", [{}, {"type": "lasting"}, {"type": "ephemeral", "ttl": "5 minutes"}, {"type": "ephemeral", "ttl": []}, 5]
)
async def test_a_mark_that_says_something_else_is_refused(control: object) -> None:
    async with Model("ok").connected() as client:
        for fields in ({"cache_control": control}, {"system": [{**text("a"), "cache_control": control}]}):
            reply = await client.post(PATH, json=ASK | fields)
            assert reply.status_code == 400
            assert "'cache_control' must have the type 'ephemeral'" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard"}, "metadata"),
        ({"cache_control": {"type": "ephemeral"}, "inference_geo": "us"}, "inference_geo"),
        ({"context_management": {"edits": []}, "mcp_servers": [], "container": None}, "context_management"),
        ({"system": [{**text("a"), "cache_control": {"type": "ephemeral"}, "shade": 1}]}, "system.shade"),
        ({"system": "x-anthropic-billing-header: cch=1;\nBe."}, "system.x-anthropic-billing-header"),
        (
            {"messages": [{"role": "user", "content": [{**text("a"), "citations": None, "hue": 1}]}]},
            "messages.content.hue",
        ),
        ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
    ],
)
async def test_what_has_no_effect_is_reported(fields: dict[str, Any], names: str) -> None:
    async with Model("ok").connected() as client:
        reply = await client.post(PATH, json=ASK | fields)
    assert (reply.status_code, reply.headers["x-quire-ignored"]) == (200, names)


async def test_what_a_model_cannot_do_is_reported() -> None:
    async with Model("ok", template=CHAT_TEMPLATE).connected() as client:
        reply = await client.post(PATH, json=ASK | {"thinking": {"type": "enabled", "budget_tokens": 9}})
        assert reply.headers["x-quire-ignored"] == "thinking.type, thinking.budget_tokens"
        reply = await client.post(PATH, json=ASK | {"output_config": {"effort": "high"}})
        assert reply.headers["x-quire-ignored"] == "output_config.effort"


async def test_a_silent_stream_is_kept_alive_by_pings() -> None:
    engine = FakeEngine(step_seconds=0.3)
    async with connect(make_app(engine=engine, sse_keep_alive_interval=0.1)) as client:
        reply = await client.post(PATH, json=ASK | {"max_tokens": 2, "stream": True})
    events = [event["type"] for event in parse_events(reply.text)]
    assert events[0] == "ping"
    assert [kind for kind in events if kind != "ping"] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 2,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_models_are_listed_for_both_kinds_of_clients() -> None:
    async with connect(make_app(model_names=("org/first", "claude-x"), max_model_len=300)) as client:
        models = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/claude-x", headers={"anthropic-version": "2023-06-01"})).json()
    assert (models["has_more"], models["first_id"], models["last_id"]) == (False, "org/first", "claude-x")
    assert models["data"][1] == one
    assert (one["type"], one["display_name"], one["max_input_tokens"]) == ("model", "claude-x", 300)
    assert one["created_at"].endswith("Z")


async def test_steps_of_tools_that_others_ran_are_passed_over_and_named() -> None:
    said = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]},
        text("It rains."),
    ]
    model = Model("So?")
    async with model.connected() as client:
        for content in (said, said[2:]):
            messages = [*ASK["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "?"}]
            reply = await client.post(PATH, json=ASK | {"messages": messages})
            assert reply.status_code == 200
            ignored = "messages.server_tool_use, messages.web_search_tool_result" if content is said else None
            assert reply.headers.get("x-quire-ignored") == ignored
    first, second = (each.prompt_token_ids for each in model.engine.submitted)
    assert first == second
