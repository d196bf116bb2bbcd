"""The anthropic package on /v1/messages: text, streams, tools, thinking, counting."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from clients import weather
from clients.conftest import KEY, MODEL
from e2e.served import Served

TOOL: dict = {"name": "get_weather", "description": weather.DESCRIPTION, "input_schema": weather.SCHEMA}


@pytest.fixture
def api(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, timeout=120) as client:
        yield client


def test_a_message_and_its_stream_agree(api: anthropic.Anthropic) -> None:
    messages: list = [{"role": "user", "content": "What is the capital of Japan?"}]
    whole = api.messages.create(model=MODEL, max_tokens=50, messages=messages, extra_body={"temperature": 0})
    assert whole.stop_reason == "end_turn"
    (block,) = whole.content
    assert block.type == "text"
    assert "Tokyo" in block.text
    with api.messages.stream(model=MODEL, max_tokens=50, messages=messages, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = api.messages.count_tokens(model=MODEL, messages=messages)
    cached = whole.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == whole.usage.input_tokens + cached


def test_a_tool_is_called_and_its_result_told(api: anthropic.Anthropic) -> None:
    messages: list = [{"role": "user", "content": weather.QUESTION}]
    first = api.messages.create(
        model=MODEL, max_tokens=200, messages=messages, tools=[TOOL], extra_body={"temperature": 0}
    )
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather.RESULT}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = api.messages.create(
        model=MODEL, max_tokens=200, messages=messages, tools=[TOOL], extra_body={"temperature": 0}
    )
    assert second.stop_reason == "end_turn"
    assert "18" in "".join(block.text for block in second.content if block.type == "text")


def test_a_streamed_call_is_the_whole_one(api: anthropic.Anthropic) -> None:
    with api.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": weather.QUESTION}],
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice={"type": "any"},
        extra_body={"temperature": 0},
    ) as stream:
        final = stream.get_final_message()
    (call, *_) = [block for block in final.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})


def test_thinking_is_a_block_of_its_own(api: anthropic.Anthropic) -> None:
    reply = api.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": "What is the capital of Japan?"}],
        thinking={"type": "enabled", "budget_tokens": 100},
        extra_body={"temperature": 0},
    )
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert "Tokyo" in reply.content[1].text  # type: ignore[union-attr]


def test_errors_have_anthropics_types(server: Served, api: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        api.messages.create(model="claude", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong") as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "hi"}])
