"""The tools that the embedded model knows how to call, and the questions that make it do so."""

from __future__ import annotations

QUESTION = "What is the weather in Paris?"
RESULT = '{"city": "Paris", "temperature": 18, "condition": "sunny"}'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The name of the city."}},
    "required": ["city"],
    "additionalProperties": False,
}
DESCRIPTION = "Get the current weather of a city."
TOOL = {"type": "function", "function": {"name": "get_weather", "description": DESCRIPTION, "parameters": SCHEMA}}


def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    assert city == "Paris"
    return RESULT
