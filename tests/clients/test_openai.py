"""The openai package: tools, parsed replies, streams of both, the Responses API."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from clients import weather
from clients.conftest import KEY, MODEL


class Person(BaseModel):
    name: str
    age: int
    city: str


class GetWeather(BaseModel):
    """Get the current weather of a city."""

    city: str


@pytest.fixture
def api(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=KEY, timeout=120) as client:
        yield client


def test_a_tool_is_called_and_its_result_told(api: openai.OpenAI) -> None:
    messages: list = [{"role": "user", "content": weather.QUESTION}]
    first = api.chat.completions.create(model=MODEL, messages=messages, tools=[weather.TOOL], temperature=0)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": weather.RESULT}]
    second = api.chat.completions.create(model=MODEL, messages=messages, tools=[weather.TOOL], temperature=0)
    assert second.choices[0].finish_reason == "stop"
    assert "18" in (second.choices[0].message.content or "")


def test_a_streamed_call_is_the_whole_one(api: openai.OpenAI) -> None:
    messages: list = [{"role": "user", "content": weather.QUESTION}]
    with api.chat.completions.stream(model=MODEL, messages=messages, tools=[weather.TOOL], temperature=0) as stream:
        events = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events
    (call,) = choice.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_can_be_demanded(api: openai.OpenAI, choice: object) -> None:
    messages: list = [{"role": "user", "content": "Hello!"}]
    reply = api.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=messages, tools=[weather.TOOL], tool_choice=choice, max_tokens=200
    )
    (call, *_) = reply.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_parse_gives_the_object(api: openai.OpenAI) -> None:
    messages: list = [
        {"role": "user", "content": "JSON for a person named Anna who is 30 years old and lives in Rome."}
    ]
    reply = api.chat.completions.parse(model=MODEL, messages=messages, response_format=Person, temperature=0)
    assert isinstance(reply.choices[0].message.parsed, Person)


def test_parse_gives_the_arguments(api: openai.OpenAI) -> None:
    messages: list = [{"role": "user", "content": weather.QUESTION}]
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    reply = api.chat.completions.parse(
        model=MODEL, messages=messages, tools=[tool], tool_choice="required", temperature=0
    )
    (call, *_) = reply.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_thoughts_come_apart(api: openai.OpenAI) -> None:
    messages: list = [{"role": "user", "content": "What is the capital of Japan?"}]
    reply = api.chat.completions.create(model=MODEL, messages=messages, reasoning_effort="low", temperature=0)
    message = reply.choices[0].message
    assert message.reasoning  # type: ignore[attr-defined]
    assert "Tokyo" in (message.content or "")
    assert "<think>" not in (message.content or "")
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0


def test_responses_in_one_piece_and_streamed(api: openai.OpenAI) -> None:
    asked = "What is the capital of Japan?"
    whole = api.responses.create(model=MODEL, input=asked, temperature=0)
    assert whole.status == "completed"
    assert "Tokyo" in whole.output_text
    with api.responses.stream(model=MODEL, input=asked, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == whole.output_text == final.output_text
    again = api.responses.create(model=MODEL, input="And of Spain?", previous_response_id=whole.id, temperature=0)
    assert "Madrid" in again.output_text
    assert api.responses.retrieve(whole.id).output_text == whole.output_text


def test_responses_call_functions(api: openai.OpenAI) -> None:
    tool: dict = {
        "type": "function", "name": "get_weather", "description": weather.DESCRIPTION, "parameters": weather.SCHEMA,
        "strict": True,
    }  # fmt: skip
    items: list = [{"role": "user", "content": weather.QUESTION}]
    first = api.responses.create(model=MODEL, input=items, tools=[tool], temperature=0, store=False)  # type: ignore[list-item]
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"}
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": weather.RESULT}]
    second = api.responses.create(model=MODEL, input=items, tools=[tool], temperature=0, store=False)  # type: ignore[list-item]
    assert "18" in second.output_text


def test_responses_parse(api: openai.OpenAI) -> None:
    reply = api.responses.parse(
        model=MODEL,
        input="JSON for a person named Anna who is 30 years old and lives in Rome.",
        text_format=Person,
        temperature=0,
    )
    assert isinstance(reply.output_parsed, Person)


def test_embeddings(api: openai.OpenAI) -> None:
    reply = api.embeddings.create(model=MODEL, input=["a cat", "a dog"])
    assert [item.index for item in reply.data] == [0, 1]
    assert len(reply.data[0].embedding) == len(reply.data[1].embedding) > 0
