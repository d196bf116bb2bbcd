"""Responses of an app or from hand-made deltas, and the events of streamed ones, checked against the documented models.

Promises: the renderer is the real one. Must not know: torch, sockets.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Usage
from quire_server.answering.options import GenerationOptions, PromptOptions, ReplyOptions
from quire_server.answering.rendering import ReplyHead
from quire_server.dialects.responses.rendering import ResponseRenderer
from quire_server.dialects.responses.reply import ResponseEvent, ResponseObject
from quire_server.dialects.responses.request import ResponseRequest
from quire_server.http.body import validate
from support.fake_engine import FakeEngine
from support.fake_tokenizer import IM_END, load_tokenizer

STEM = "ab" * 24
HEAD, TAIL = "<|im_start|>", "<|im_end|>\n"  # of a message in the fake tokenizer's template


def saying(text: bytes = b"yes") -> FakeEngine:
    return FakeEngine(replies=lambda request, choice: (*text, IM_END))


async def respond(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    reply = await client.post("/v1/responses", json={"model": "fake", "input": "hi", **fields})
    assert reply.status_code == 200, reply.text
    ResponseObject.model_validate_json(reply.content, strict=True)
    body: dict[str, Any] = reply.json()
    return body


def delta(**fields: Any) -> ChoiceDelta:
    return ChoiceDelta(index=0, prompt=0, **fields)


def renderer(kept: list[bytes] | None = None, **fields: object) -> ResponseRenderer:
    """Of a request with these fields; `kept` gets what would be stored."""
    request = validate(ResponseRequest, {"input": "hi", **fields})
    num_logprobs = 0 if request.include else None
    options = GenerationOptions(
        prompt=PromptOptions(source=["hi"], param="input"), reply=ReplyOptions(num_logprobs=num_logprobs)
    )
    usage = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
    return ResponseRenderer(
        ReplyHead(id="x", created=1, model="fake", system_fingerprint="fp"),
        SimpleNamespace(options=options),  # type: ignore[arg-type]
        SimpleNamespace(usage=usage),  # type: ignore[arg-type]
        tokenizer=load_tokenizer(),
        stem=STEM,
        shown=request.shown({}) | {"store": True},
        tools=request.offered(),
        keep=lambda raw, _: None if kept is None else kept.append(raw),
    )


def parse_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream: framed, numbered, named by their type and of the documented form."""
    assert text.endswith("\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        ResponseEvent.model_validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


_GROWS = {"response.function_call_arguments.delta": "arguments", "response.custom_tool_call_input.delta": "input"}
_WHOLES = {
    "response.function_call_arguments.done": ("arguments", "name"),
    "response.custom_tool_call_input.done": ("input",),
}


def rebuilt(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items, put together from the deltas alone; what the events say of wholes must agree."""
    items: list[dict[str, Any]] = []
    for event in copy.deepcopy(events):
        kind = event["type"]
        if "output_index" in event:
            assert event["output_index"] in (len(items), len(items) - 1)
            is_new = event["output_index"] == len(items)
            assert is_new == (kind == "response.output_item.added")
        if kind == "response.output_item.added":
            assert event["item"]["status"] == "in_progress"
            assert not items or items[-1]["status"] != "in_progress"
            items.append(event["item"])
        elif kind == "response.content_part.added":
            assert event["content_index"] == len(items[-1]["content"]) == 0
            items[-1]["content"].append(event["part"])
        elif kind in _GROWS:
            items[-1][_GROWS[kind]] += event["delta"]
        elif kind.endswith("_text.delta"):
            items[-1]["content"][0]["text"] += event["delta"]
            if "logprobs" in event:
                items[-1]["content"][0]["logprobs"] += event["logprobs"]
        elif kind.endswith("_text.done"):
            assert event["text"] == items[-1]["content"][0]["text"]
        elif kind in _WHOLES:
            assert all(event[name] == items[-1][name] for name in _WHOLES[kind])
        elif kind == "response.content_part.done":
            assert event["part"] == items[-1]["content"][0]
        elif kind == "response.output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert event["item"] == items[-1]
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
    return items
