"""Mixed streams over HTTP, and all that their clients see of them: what must not depend on which engine computes.

Greedy and sampled, with two choices, log-probabilities, penalties, a grammar, a schema, calls of tools, stop strings.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = {"type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 3, "maxItems": 3}
PEOPLE = {"type": "object", "properties": {"names": WORDS}, "required": ["names"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "note", "parameters": PEOPLE, "strict": True}}
BUSY, TRIES = 503, 60
PROMPTS = ("Once upon a time", "1, 2, 3,", "The capital of France is", "Hello", "A list:", "{", "My name is", "We")


def asked(number: int) -> tuple[str, dict[str, Any]]:
    """The path and the body of the stream of this number."""
    prompt = f"{PROMPTS[number // 8 % len(PROMPTS)]} {number}"
    length = 40 + number * 7 % 60
    common: dict[str, Any] = {"seed": 1000 + number, "max_tokens": length, "stream": True, "return_token_ids": True}
    text = common | {"prompt": prompt, "ignore_eos": True}
    chat = common | {"messages": [{"role": "user", "content": prompt}], "max_tokens": 160}
    form = {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE, "strict": True}}
    completions, chats = "/v1/completions", "/v1/chat/completions"
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        (completions, text | {"temperature": 0, "logprobs": 2}),
        (completions, text | {"temperature": 0.9, "logprobs": 1}),
        (completions, text | {"temperature": 0.8, "n": 2}),
        (chats, chat | {"guided_regex": "([a-z]{2,9} ){12}end"}),
        (chats, chat | {"response_format": form}),
        (chats, chat | {"tools": [TOOL], "tool_choice": "required"}),
        (completions, text | {"temperature": 0.7, "stop": ["the", ". "], "ignore_eos": False}),
        (completions, text | {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2}),
    )
    return kinds[number % len(kinds)]


async def reached(share: Callable[[], float], goal: float) -> None:
    """Wait until this share of the chunks has come."""
    while share() < goal:  # noqa: ASYNC110 - it is looked at, not told
        await asyncio.sleep(0.01)


@dataclass(slots=True)
class Said:
    """What a client got, by choice; equal for equal answers."""

    text: dict[int, str] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)
    is_done: bool = False
    heard: list[float] = field(default_factory=list, compare=False)  # times of chunks, seconds

    def take(self, event: dict[str, Any]) -> None:
        self.heard.append(time.monotonic())
        if "error" in event:
            self.errors.append((0, event["error"]))
            return
        for choice in event["choices"]:
            index, delta = choice["index"], choice.get("delta") or {}
            _add(self.text, index, choice.get("text") or delta.get("content") or "")
            _add(self.thoughts, index, delta.get("reasoning") or "")
            _add(self.calls, index, "".join(each["function"]["arguments"] for each in delta.get("tool_calls") or ()))
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
            self.logprobs.setdefault(index, []).extend((choice.get("logprobs") or {}).get("token_logprobs") or [])
            if choice["finish_reason"]:
                assert index not in self.finish, "a choice ends once"
                self.finish[index] = choice["finish_reason"]


def _add(texts: dict[int, str], index: int, more: str) -> None:
    texts[index] = texts.get(index, "") + more


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(300, connect=60), limits=limits)


async def stream(
    http: httpx.AsyncClient, number: int, on_chunk: Callable[[], None], model: str = "", tries: int = TRIES
) -> Said:
    """One stream to its end; `on_chunk` is called with each of its chunks. `model`: of several, by its name.

    Who is refused before anything is computed, since the processes that check grammars are busy, comes again.
    """
    for _ in range(tries - 1):
        said = await _stream(http, number, on_chunk, model)
        if not (said.errors and said.errors[0][0] == BUSY):
            return said
        await asyncio.sleep(1)
    return await _stream(http, number, on_chunk, model)


async def _stream(http: httpx.AsyncClient, number: int, on_chunk: Callable[[], None], model: str) -> Said:
    path, body = asked(number)
    body |= {"model": model} if model else {}
    said = Said()
    async with http.stream("POST", path, json=body) as reply:
        if reply.status_code != 200:
            said.errors.append((reply.status_code, (await reply.aread()).decode()))
            return said
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                said.is_done = True
            elif line.startswith("data: {"):
                said.take(json.loads(line.removeprefix("data: ")))
                on_chunk()
    return said


async def streams(url: str, count: int, disturb: Callable[[Callable[[], float]], Any] | None = None) -> list[Said]:
    """So many streams at once. `disturb` runs beside them; it gets a function for the share of chunks that have come.

    The share is of what these streams would have at two thirds of their longest lengths, so it passes 1 near the end.
    """
    seen, expected = 0, sum(asked(number)[1]["max_tokens"] for number in range(count)) * 0.5

    def chunk() -> None:
        nonlocal seen
        seen += 1

    async with client(url) as http:
        tasks = [asyncio.create_task(stream(http, number, chunk)) for number in range(count)]
        beside = None if disturb is None else asyncio.create_task(disturb(lambda: seen / expected))
        said = await asyncio.gather(*tasks)
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
    return list(said)


def differences(expected: list[Said], got: list[Said]) -> list[str]:
    """A line for each stream that is not as it was."""
    lines = []
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one != other or other.errors or not other.is_done:
            lines.append(f"stream {number} ({asked(number)[0]}): {_first_difference(one, other)}")
    return lines


def _first_difference(one: Said, other: Said) -> str:
    if other.errors:
        return f"errors {other.errors}"
    for name in ("token_ids", "text", "thoughts", "calls", "logprobs", "finish", "is_done"):
        if getattr(one, name) != getattr(other, name):
            return f"{name}: expected {str(getattr(one, name))[:300]}, got {str(getattr(other, name))[:300]}"
    return "not done"
