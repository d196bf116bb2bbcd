"""A hundred prompts for ten usual tools, each with a call that must come, and what the calls are worth.

`python -m real.tools_trial URL MODEL [PROMPTS]`, from tests, prints the counts of a server that runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
from jsonschema.validators import Draft202012Validator

PROMPTS_EACH = 10  # of every tool
MAX_TOKENS = 256
TOGETHER = 4
_PATHS = ("notes/a.txt", "src/main.py", "/etc/hosts", "data/2024/café.csv", "README.md")
_PLACES = ("Paris", "Zürich", "New York", "東京", "São Paulo")
_SHORT = {"type": "string", "maxLength": 80}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 100_000}
_FLAG = {"type": "boolean"}


@dataclass(frozen=True)
class Tool:
    """A tool, the values that prompts ask for, and whether its parameters take further names."""

    name: str
    properties: dict[str, dict[str, Any]]
    required: tuple[str, ...]
    values: dict[str, tuple[Any, ...]]
    is_closed: bool = True

    @property
    def schema(self) -> dict[str, Any]:
        found = {"type": "object", "properties": self.properties, "required": list(self.required)}
        return {**found, "additionalProperties": False} if self.is_closed else found

    @property
    def wire(self) -> dict[str, Any]:
        described = f"Use this to {self.name.replace('_', ' ')}."
        return {
            "type": "function",
            "function": {"name": self.name, "description": described, "parameters": self.schema},
        }


TOOLS = (
    Tool(
        "read_file",
        {"path": _SHORT, "offset": _COUNT, "limit": _COUNT},
        ("path",),
        {"path": _PATHS, "offset": (5, 100, 0), "limit": (9, 20, 2000)},
        is_closed=False,
    ),
    Tool(
        "write_file",
        {"path": _SHORT, "content": {"type": "string", "maxLength": 200}, "append": _FLAG},
        ("path", "content"),
        {"path": _PATHS, "content": ("hello", 'say "hi"', "a\nb", "<b>bold</b>"), "append": (True, False)},
    ),
    Tool(
        "list_dir",
        {"path": _SHORT, "recursive": _FLAG, "max_entries": _COUNT},
        ("path",),
        {"path": ("src", "/tmp", "."), "recursive": (True, False), "max_entries": (10, 50)},
        is_closed=False,
    ),
    Tool(
        "search",
        {
            "query": _SHORT,
            "path": _SHORT,
            "case_sensitive": _FLAG,
            "max_results": {"type": "integer", "minimum": 1, "maximum": 100},
        },
        ("query",),
        {
            "query": ("def main", "TODO", "naïve"),
            "path": ("src", "."),
            "case_sensitive": (True,),
            "max_results": (5, 100),
        },
    ),
    Tool(
        "run_command",
        {"command": _SHORT, "timeout_seconds": {"type": "number", "minimum": 0, "maximum": 600}, "cwd": _SHORT},
        ("command",),
        {"command": ("ls -la", "git status", 'grep "x" a.txt'), "timeout_seconds": (30, 1.5), "cwd": ("/tmp", "src")},
    ),
    Tool(
        "get_weather",
        {
            "location": _SHORT,
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        ("location",),
        {"location": _PLACES, "unit": ("celsius", "fahrenheit"), "days": (1, 3, 14)},
        is_closed=False,
    ),
    Tool(
        "send_email",
        {
            "to": {
                "type": "array",
                "items": {"type": "string", "format": "email", "maxLength": 60},
                "minItems": 1,
                "maxItems": 3,
            },
            "subject": _SHORT,
            "body": {"type": "string", "maxLength": 200},
            "cc": {"type": ["string", "null"], "maxLength": 60},
        },
        ("to", "subject", "body"),
        {
            "to": (["a@example.com"], ["b@example.org", "c@example.org"]),
            "subject": ("Report", "Grüße"),
            "body": ("See you.", "Hi & bye"),
            "cc": (None,),
        },
    ),
    Tool(
        "create_event",
        {"title": _SHORT, "date": {"type": "string", "format": "date"}, "duration_minutes": _COUNT, "location": _SHORT},
        ("title", "date"),
        {
            "title": ("Lunch", "Review"),
            "date": ("2024-02-29", "2023-12-01"),
            "duration_minutes": (30, 90),
            "location": _PLACES,
        },
    ),
    Tool(
        "reply_to",
        {
            "message_id": {"type": "integer", "enum": [1234567890123456789, 1234567890123456790]},
            "text": _SHORT,
            "quote": _FLAG,
        },
        ("message_id", "text"),
        {
            "message_id": (1234567890123456789, 1234567890123456790),
            "text": ("ok", "Thanks! 😀"),
            "quote": (True, False),
        },
    ),
    Tool(
        "convert",
        {
            "amount": {"type": "number"},
            "from": {"enum": ["EUR", "USD", "JPY"]},
            "to": {"enum": ["EUR", "USD", "JPY"]},
            "precision": {"type": "integer", "minimum": 0, "maximum": 10},
        },
        ("amount", "from", "to"),
        {"amount": (100, 0.5, 1e6), "from": ("EUR",), "to": ("USD", "JPY"), "precision": (2, 4)},
        is_closed=False,
    ),
)


@dataclass(frozen=True)
class Asked:
    """A prompt for one tool, with the names of the values that it asks for."""

    tool: Tool
    text: str
    names: frozenset[str]
    is_named: bool  # whether `tool_choice` names the tool, or requires any


def prompts() -> list[Asked]:
    """The same prompts in every run; values come in any order, as people write them."""
    draw, found = Random(45), []
    for number in range(PROMPTS_EACH):
        for tool in TOOLS:
            names = [name for name in tool.values if name in tool.required or draw.random() < 0.6]
            draw.shuffle(names)
            values = {name: draw.choice(tool.values[name]) for name in names}
            text = f"Call {tool.name} with exactly these arguments: {json.dumps(values, ensure_ascii=number % 2 == 0)}"
            found.append(Asked(tool, text, frozenset(names), is_named=number % 2 == 1))
    return found


def judged(asked: Asked, choice: dict[str, Any]) -> list[str]:
    """What is said of one reply: `whole`, or its faults; and what it added or left out."""
    if choice["finish_reason"] == "length":
        return ["cut"]
    calls = choice["message"].get("tool_calls") or []
    # As with OpenAI, a reply to a named tool stops.
    if choice["finish_reason"] != ("stop" if asked.is_named else "tool_calls") or not calls:
        return ["no call"]
    found = []
    for call in calls:
        tool = next((each for each in TOOLS if each.name == call["function"]["name"]), None)
        if tool is None or (asked.is_named and tool is not asked.tool):
            return ["another tool"]
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            return ["no JSON"]
        found += [] if Draft202012Validator(tool.schema).is_valid(arguments) else ["invalid"]
        found += ["invented names"] if set(arguments) - set(tool.properties) else []
        found += ["lost properties"] if tool is asked.tool and asked.names - set(arguments) else []
    return found if "invalid" in found else ["whole", *found]


async def trial(url: str, model: str, temperature: float, *, most: int | None = None) -> Counter[str]:
    """Ask all prompts, or the first `most`, some at a time. Raises httpx.HTTPStatusError."""
    room = asyncio.Semaphore(TOGETHER)
    counts: Counter[str] = Counter()

    async def one(http: httpx.AsyncClient, seed: int, asked: Asked) -> None:
        named = {"type": "function", "function": {"name": asked.tool.name}}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": asked.text}],
            "tools": [tool.wire for tool in TOOLS],
            "tool_choice": named if asked.is_named else "required",
            "parallel_tool_calls": False,
            "temperature": temperature,
            "seed": seed,
            "max_tokens": MAX_TOKENS,
        }
        async with room:
            reply = await http.post(f"{url}/v1/chat/completions", json=body)
            while reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # grammars wait to be checked
                await asyncio.sleep(float(reply.headers["Retry-After"]))
                reply = await http.post(f"{url}/v1/chat/completions", json=body)
        reply.raise_for_status()
        for word in judged(asked, reply.json()["choices"][0]):
            counts[word] += 1

    async with httpx.AsyncClient(timeout=1200) as http:
        first, *others = enumerate(prompts()[:most])
        await one(http, *first)  # the description of the tools, which all prompts share, is computed once
        await asyncio.gather(*(one(http, seed, asked) for seed, asked in others))
    return counts


if __name__ == "__main__":
    for degrees in (0.0, 1.0):
        few = int(sys.argv[3]) if len(sys.argv) > 3 else None
        print(degrees, dict(asyncio.run(trial(sys.argv[1], sys.argv[2], degrees, most=few))), flush=True)
