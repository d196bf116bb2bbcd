"""`kill -9` of the engine under streams that grammars, calls and limits of thinking bind: the same tokens come."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import pytest

from e2e.served import Served

pytestmark = pytest.mark.e2e

WORDS = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 12, "maxItems": 12}
PEOPLE = {
    "type": "object",
    "properties": {"names": WORDS, "cities": WORDS, "sizes": {**WORDS, "items": {"type": "integer"}}},
    "required": ["names", "cities", "sizes"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": PEOPLE, "strict": True}}


def chat(text: str, seed: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    common = {"messages": messages, "seed": seed, "max_tokens": 700, "stream": True, "return_token_ids": True}
    return common | fields


def bodies() -> list[dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE, "strict": True}}
    return [
        chat("Give me JSON.", 1, response_format=form),
        chat("Give me JSON.", 2, response_format=form, temperature=0),
        chat("Note some people.", 3, tools=[TOOL], tool_choice="required"),
        chat("Tell me a long story.", 4, reasoning_effort="low", max_reasoning_tokens=150, ignore_eos=True),
        chat("What is 12 + 30?", 5, reasoning_effort="low", response_format=form, max_reasoning_tokens=40),
        chat("Write words.", 6, guided_regex="([a-z]{2,9} ){150}end"),
    ]


class Said:
    """What one stream has said so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = self.reasoning = self.arguments = ""
        self.finish: str | None = None

    def take(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self.token_ids += choice.get("token_ids") or []
            self.text += delta.get("content") or ""
            self.reasoning += delta.get("reasoning") or ""
            self.arguments += "".join(call["function"]["arguments"] for call in delta.get("tool_calls") or ())
            self.finish = choice["finish_reason"] or self.finish


async def stream(http: httpx.AsyncClient, body: dict[str, Any], said: Said) -> Said:
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                said.take(chunk)
    return said


async def compare(server: Served) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        alone = await asyncio.gather(*(stream(http, body, Said()) for body in bodies()))
        seen = [Said() for _ in alone]
        tasks = [asyncio.create_task(stream(http, body, said)) for body, said in zip(bodies(), seen, strict=True)]
        for share in (0.2, 0.5, 0.8):
            async with asyncio.timeout(300):
                while any(  # noqa: ASYNC110
                    len(said.token_ids) < share * len(one.token_ids) for said, one in zip(seen, alone, strict=True)
                ):
                    await asyncio.sleep(0.005)
            os.kill(server.engine().pid, signal.SIGKILL)
        killed = await asyncio.gather(*tasks)
    for one, other in zip(alone, killed, strict=True):
        assert other.token_ids == one.token_ids
        assert (other.text, other.reasoning, other.arguments) == (one.text, one.reasoning, one.arguments)
        assert other.finish == one.finish
    for said in (alone[0], alone[1], alone[4]):
        if said.finish == "stop":
            assert set(json.loads(said.text)) == set(PEOPLE["properties"])
    assert alone[2].arguments
    assert alone[3].reasoning
    assert len(alone[5].text.split()) == 151


def test_what_binds_a_reply_binds_it_after_kills() -> None:
    with Served("--max-model-len", "2048") as server:
        asyncio.run(compare(server))
        assert server.metric("quire_engine_restarts_total") >= 1
        server.wait_idle()
