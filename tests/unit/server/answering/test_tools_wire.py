"""Tools in chat requests: what is taken, what is refused, and which of them the model is told of."""

from __future__ import annotations

import pytest

from quire_server.answering.options import Conversation, GenerationOptions, Tool
from quire_server.dialects.chat.wire import ChatCompletionRequest
from quire_server.errors import BadRequest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time", "strict": True}}


def options(**fields: object) -> GenerationOptions:
    messages = [{"role": "user", "content": "a"}]
    return ChatCompletionRequest.model_validate({"messages": messages, **fields}, strict=True).options()


def shown(asked: GenerationOptions) -> list[str]:
    assert isinstance(asked.prompt.source, Conversation)
    return [tool["function"]["name"] for tool in asked.prompt.source.tools]  # type: ignore[index]


def test_tools_reach_the_template_as_they_came():
    asked = options(tools=[WEATHER, TIME])
    assert isinstance(asked.prompt.source, Conversation)
    assert list(asked.prompt.source.tools) == [WEATHER, TIME]
    assert asked.tools is not None
    assert asked.tools.tools == (
        Tool(name="get_weather", description="Now.", parameters=SCHEMA),
        Tool(name="get_time", strict=True),
    )
    assert (asked.tools.choice, asked.tools.parallel) == ("auto", True)


def test_a_choice_of_some_tools_hides_the_others_and_of_none_hides_no_tool():
    assert shown(options(tools=[WEATHER, TIME], tool_choice="none")) == ["get_weather", "get_time"]
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}}
    asked = options(tools=[WEATHER, TIME], tool_choice=some)
    assert shown(asked) == ["get_time"]
    assert asked.tools is not None
    assert asked.tools.choice == "required"


def test_a_named_function_must_be_called():
    asked = options(tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": "get_time"}})
    assert asked.tools is not None
    assert (asked.tools.choice, asked.tools.function) == ("function", "get_time")
    assert shown(asked) == ["get_weather", "get_time"]


def test_no_tools_are_no_tools():
    assert options(tools=[], tool_choice="none").tools is None
    assert options(tools=[], parallel_tool_calls=False).ignored == ("parallel_tool_calls",)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "auto"}, "needs 'tools'"),
        ({"tool_choice": "required", "tools": []}, "needs 'tools'"),
        ({"tools": [WEATHER, WEATHER]}, "Two tools have the name 'get_weather'"),
        ({"tools": [{"type": "web_search"}]}, "Tools of type 'web_search' are not supported"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "names 'f', which is not in 'tools'",
        ),
        (
            {
                "tools": [TIME],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "x"}]}},
            },
            "needs its function's name",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(fields: dict[str, object], words: str):
    with pytest.raises(BadRequest, match=words):
        options(**fields)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [TIME], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": 1}, "tool_choice"),
    ],
)
def test_what_is_no_tool_is_named(fields: dict[str, object], where: str):
    with pytest.raises(ValueError, match=where):
        options(**fields)


def test_as_many_tools_with_as_long_names_as_agents_have():
    named = [{"type": "function", "function": {"name": f"t{i}".ljust(256, "x")}} for i in range(1024)]
    assert len(shown(options(tools=named))) == 1024
    longer = {"type": "function", "function": {"name": "x" * 257}}
    for wrong, why in (([*named, TIME], "at most 1024"), ([longer], "pattern")):
        with pytest.raises(ValueError, match=why):
            options(tools=wrong)
