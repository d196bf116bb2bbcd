"""Requests in the words and schemas that common SDKs and first-time users send, with what a right answer holds.

Promises that none of them is taken from the corpus. Must not know how answers are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

JSON = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A right answer has these calls (name and arguments), or this JSON value, or else these words and no call."""

    kind: str
    messages: Sequence[JSON]
    tools: Sequence[JSON] = ()
    thinking: bool = False
    calls: Sequence[Sequence[object]] = ()
    value: JSON | None = None
    words: str = ""


def _user(text: str) -> list[JSON]:
    return [{"role": "user", "content": text}]


def _function(name: str, description: str, parameters: JSON) -> JSON:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = _function(  # as a Python function with a docstring becomes a tool
    "get_weather",
    "Get the current weather in a given city.",
    {
        "properties": {"city": {"title": "City", "type": "string"}},
        "required": ["city"],
        "title": "get_weather_args",
        "type": "object",
        "additionalProperties": False,
    },
)
WEATHER_WITH_UNIT = _function(  # as written by hand after the OpenAI documentation's pattern
    "get_current_weather",
    "Get the current weather in a given location",
    {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location"],
    },
)
ADD = _function(
    "add",
    "Add two integers.",
    {
        "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
        "required": ["a", "b"],
        "title": "add",
        "type": "object",
    },
)
MULTIPLY = _function(
    "multiply",
    "Multiply two integers.",
    {
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "type": "object",
    },
)
CALCULATE = _function(  # as zod writes a schema
    "calculate",
    "Evaluate a math expression",
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "The expression to evaluate"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
)
TIME = _function(
    "get_time",
    "Get the current time in a city",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


def _after(question: str, name: str, arguments: str, result: str) -> list[JSON]:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]


PERSON = (
    '{"properties": {"name": {"title": "Name", "type": "string"}, "age": {"title": "Age", "type": "integer"}},'
    ' "required": ["name", "age"], "title": "UserInfo", "type": "object"}'
)
ASSISTANT: JSON = {"role": "system", "content": "You are a helpful assistant."}

CLIENT_REQUESTS = [
    ClientRequest(
        kind="a call",
        messages=_user("What is the weather in Paris?"),
        tools=[WEATHER],
        calls=[["get_weather", {"city": "Paris"}]],
    ),
    ClientRequest(
        kind="a call",
        messages=[ASSISTANT, *_user("What's the weather like in Tokyo today?")],
        tools=[WEATHER, ADD],
        calls=[["get_weather", {"city": "Tokyo"}]],
    ),
    ClientRequest(
        kind="a call",
        messages=_user("What is the weather in San Francisco?"),
        tools=[TIME, WEATHER_WITH_UNIT],
        calls=[["get_current_weather", {"location": "San Francisco"}]],
    ),
    ClientRequest(
        kind="a call",
        messages=_user("What is the weather in Boston in celsius?"),
        tools=[WEATHER_WITH_UNIT],
        calls=[["get_current_weather", {"location": "Boston", "unit": "celsius"}]],
    ),
    ClientRequest(
        kind="a call",
        messages=_user("What is 12 + 30?"),
        tools=[ADD, MULTIPLY],
        calls=[["add", {"a": 12, "b": 30}]],
    ),
    ClientRequest(
        kind="a call",
        messages=_user("What is 123 times 45?"),
        tools=[ADD, MULTIPLY],
        calls=[["multiply", {"a": 123, "b": 45}]],
    ),
    ClientRequest(
        kind="a call",
        messages=[ASSISTANT, *_user("What is 17 * 23?")],
        tools=[WEATHER, CALCULATE],
        calls=[["calculate", {"expression": "17 * 23"}]],
    ),
    ClientRequest(
        kind="a call",
        messages=_user("What time is it in London?"),
        tools=[WEATHER, TIME, ADD],
        calls=[["get_time", {"city": "London"}]],
    ),
    ClientRequest(
        kind="a call",
        messages=_user("What is the weather in Rome and in Madrid?"),
        tools=[WEATHER],
        calls=[["get_weather", {"city": "Rome"}], ["get_weather", {"city": "Madrid"}]],
    ),
    ClientRequest(
        kind="a call",
        messages=_user("What is the weather in Paris?"),
        tools=[WEATHER, TIME],
        thinking=True,
        calls=[["get_weather", {"city": "Paris"}]],
    ),
    ClientRequest(kind="no call", messages=_user("Hello!"), tools=[WEATHER], words="How can I help you"),
    ClientRequest(
        kind="no call", messages=_user("What is the capital of France?"), tools=[WEATHER, ADD], words="is Paris."
    ),
    ClientRequest(
        kind="no call", messages=[ASSISTANT, *_user("Thank you!")], tools=[ADD, MULTIPLY, TIME], words="You are welcome"
    ),
    ClientRequest(
        kind="an answer",
        messages=_after("What is the weather in Paris?", "get_weather", '{"city": "Paris"}', "18 degrees and sunny"),
        tools=[WEATHER],
        words="It is 18 degrees and sunny in Paris.",
    ),
    ClientRequest(
        kind="an answer",
        messages=_after(
            "What's the weather in Tokyo?",
            "get_weather",
            '{"city":"Tokyo"}',
            '{"temperature": 22, "condition": "cloudy"}',
        ),
        tools=[WEATHER],
        words="It is 22 degrees and cloudy in Tokyo.",
    ),
    ClientRequest(
        kind="an answer",
        messages=_after("What is 12 + 30?", "add", '{"a":12,"b":30}', "42"),
        tools=[ADD],
        words="42",
    ),
    ClientRequest(
        kind="an answer",
        messages=_after("What time is it in London?", "get_time", '{"city":"London"}', '{"time": "14:05"}'),
        tools=[TIME],
        words="It is 14:05 in London.",
    ),
    ClientRequest(
        kind="JSON",
        messages=[
            {"role": "system", "content": f"Answer only with JSON that matches this schema:\n{PERSON}"},
            *_user("Jason is 25 years old"),
        ],
        value={"name": "Jason", "age": 25},
    ),
    ClientRequest(
        kind="JSON",
        messages=_user(f"Extract the data by this JSON schema: {PERSON}\n\nMaria is 41 years old and lives in Rome."),
        value={"name": "Maria", "age": 41},
    ),
    ClientRequest(
        kind="JSON",
        messages=[
            {"role": "system", "content": "Reply with a JSON object with the keys name, age and city."},
            *_user("Anna is 31 years old and lives in Oslo."),
        ],
        value={"name": "Anna", "age": 31, "city": "Oslo"},
    ),
    ClientRequest(
        kind="JSON",
        messages=_user("Give me a JSON object for a person named Bob who is 44 years old and lives in Paris."),
        value={"name": "Bob", "age": 44, "city": "Paris"},
    ),
    ClientRequest(kind="a thought", messages=_user("What is 37 + 25?"), thinking=True, words="37 + 25 = 62"),
    ClientRequest(kind="a thought", messages=_user("What is 7 * 23?"), thinking=True, words="7 * 23 = 161"),
    ClientRequest(kind="a thought", messages=_user("What is the capital of Japan?"), thinking=True, words="is Tokyo."),
]
