"""Tools and thoughts through /v1/messages: what the model is told, how its uses come back, an agent's loop."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.fake_tokenizer import CHAT_TEMPLATE
from support.messages import ASK, PATH, Model, parse_events, streamed, whole

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
STORY = f"<think>\nI must look.\n</think>\n\nLet me see.\n{CALL}\n{OTHER}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "of a city", "input_schema": CITY, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "get_time", "input_schema": {"type": "object"}, "strict": False},
]
WEATHER = {"type": "tool_use", "name": "get_weather", "input": {"city": "Zürich", "days": [1, 2]}}
TIME = {"type": "tool_use", "name": "get_time", "input": {}}
SAID = {"type": "text", "text": "Let me see.\n"}


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def told_tools(model: Model) -> list[str]:
    line = model.prompt.split("\n", 1)[0]
    return [tool["function"]["name"] for tool in json.loads(line)] if line.startswith("[{") else []


@pytest.mark.parametrize(
    ("said", "choice", "content", "stop"),
    [
        (CALL, None, [WEATHER], "tool_use"),
        (f"Let me see.\n{CALL}\n{OTHER}", {"type": "any"}, [SAID, WEATHER, TIME], "tool_use"),
        (f"{OTHER}\n{CALL}", {"type": "auto", "disable_parallel_tool_use": True}, [TIME], "tool_use"),
        (OTHER, {"type": "tool", "name": "get_time"}, [TIME], "tool_use"),
        (f"{CALL}\nThen.\n{OTHER}", None, [WEATHER, {"type": "text", "text": "\nThen.\n"}, TIME], "tool_use"),
        (OTHER, {"type": "none"}, [{"type": "text", "text": OTHER}], "end_turn"),
        ("Let me see.\n", None, [SAID], "end_turn"),
    ],
)
async def test_whole_and_streamed_messages_have_the_same_uses(
    said: str, choice: object, content: list[dict[str, Any]], stop: str
) -> None:
    async with Model(said).connected() as client:
        one = await whole(client, tools=TOOLS, tool_choice=choice)
        other = await streamed(client, tools=TOOLS, tool_choice=choice)
    assert without_ids(one["content"]) == without_ids(other["content"]) == content
    assert one["stop_reason"] == other["stop_reason"] == stop
    assert one["usage"] == other["usage"]
    uses = [block["id"] for block in one["content"] if block["type"] == "tool_use"]
    assert len(set(uses)) == len(uses)
    assert all(use.startswith("toolu_") for use in uses)


async def test_thoughts_come_before_text_and_uses() -> None:
    async with Model(STORY).connected() as client:
        one = await whole(client, tools=TOOLS)
        thought, *rest = one["content"]
        assert (thought["type"], thought["thinking"]) == ("thinking", "I must look.")
        assert thought["signature"]
        assert without_ids(rest) == [SAID, WEATHER, TIME]
        assert 10 < one["usage"]["output_tokens_details"]["thinking_tokens"] < one["usage"]["output_tokens"]
        other = await streamed(client, tools=TOOLS)
        assert without_ids(other["content"]) == without_ids(one["content"])


async def test_thoughts_that_are_not_to_be_shown() -> None:
    fields = {"thinking": {"type": "enabled", "budget_tokens": 99, "display": "omitted"}}
    async with Model("I must look.\n</think>\n\nDone.").connected() as client:
        one = await whole(client, **fields)
        assert one["content"][0]["thinking"] == ""
        assert one["content"][0]["signature"]
        assert one["content"][1] == {"type": "text", "text": "Done."}
        assert (await streamed(client, **fields))["content"] == one["content"]


async def test_what_the_engine_is_told_of_thinking() -> None:
    model = Model("x")
    async with model.connected() as client:
        await whole(client, thinking={"type": "enabled", "budget_tokens": 7})
        thinking = model.engine.submitted[-1].sampling.thinking
        assert thinking is not None
        assert (thinking.max_tokens, thinking.is_open) == (7, True)
        await whole(client, thinking={"type": "adaptive"})
        assert model.engine.submitted[-1].sampling.thinking is None


@pytest.mark.parametrize(
    ("tools", "choice", "names"),
    [
        (TOOLS, None, ["get_weather", "get_time"]),
        (TOOLS, {"type": "tool", "name": "get_time"}, ["get_weather", "get_time"]),
        (TOOLS, {"type": "none"}, ["get_weather", "get_time"]),
        ([], {"type": "auto"}, []),
    ],
)
async def test_which_tools_the_model_is_told_of(tools: list[Any], choice: object, names: list[str]) -> None:
    model = Model("ok")
    async with model.connected() as client:
        await whole(client, tools=tools, tool_choice=choice)
        assert told_tools(model) == names
        if names:
            told = json.loads(model.prompt.split("\n", 1)[0])[0]["function"]
            assert told == {"name": "get_weather", "description": "of a city", "parameters": CITY}


async def test_an_agents_loop() -> None:
    model = Model(STORY, "It is sunny.")
    messages: list[dict[str, Any]] = [*ASK["messages"]]
    async with model.connected() as client:
        first = await whole(client, tools=TOOLS, messages=messages)
        uses = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "text", "text": "And?"},
            {"type": "tool_result", "tool_use_id": uses[1], "content": "noon", "is_error": True},
            {"type": "tool_result", "tool_use_id": uses[0], "content": [{"type": "text", "text": "sunny"}]},
        ]
        messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
        second = await whole(client, tools=TOOLS, messages=messages)
        assert second["content"] == [{"type": "text", "text": "It is sunny."}]
        assert model.prompt.split("\n", 1)[1] == (
            "[user]hi;[assistant]<think>I must look.</think>Let me see.\n"
            "<tool_call>get_weather Zürich</tool_call><tool_call>get_time </tool_call>;"
            "[tool]Error: noon;[tool]sunny;[user]And?;[assistant]"
        )


async def test_a_model_without_a_place_for_tools_is_told_in_words() -> None:
    model = Model('{"name": "get_time", "parameters": {"zone": "CET"}}', template=CHAT_TEMPLATE, max_model_len=1024)
    async with model.connected() as client:
        reply = await whole(client, tools=TOOLS, system="Be brief.")
        assert "Be brief.\n\nYou can call functions." in model.prompt
        assert without_ids(reply["content"]) == [{"type": "tool_use", "name": "get_time", "input": {"zone": "CET"}}]


async def test_ids_that_a_template_insists_on_are_kept() -> None:
    said = '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]'
    async with Model(said, calls="mistral").connected() as client:
        reply = await whole(client, tools=TOOLS)
    [use] = reply["content"]
    assert len(use["id"]) == 9


async def test_a_use_that_is_cut_off() -> None:
    async with Model(CALL).connected() as client:
        reply = await whole(client, tools=TOOLS, max_tokens=70)
        assert (reply["stop_reason"], without_ids(reply["content"])) == ("max_tokens", [WEATHER | {"input": {}}])
        raw = await client.post(PATH, json=ASK | {"tools": TOOLS, "max_tokens": 70, "stream": True})
    pieces = [
        event["delta"]["partial_json"] for event in parse_events(raw.text) if "index" in event and "delta" in event
    ]
    assert "".join(pieces).startswith('{"city": "Z')


async def test_a_schema_for_the_text_is_handed_on() -> None:
    from quire_server.dialects.messages.request import MessageRequest
    from quire_server.http.body import validate

    form = {"type": "json_schema", "schema": CITY}
    for fields, param in (
        ({"output_config": {"format": form}}, "output_config.format"),
        ({"output_format": form}, "output_format"),
    ):
        structure = validate(MessageRequest, ASK | fields).options().structure
        assert structure is not None
        assert (structure.kind, json.loads(structure.value), structure.param) == ("json_schema", CITY, param)
