"""A model behind /v1/messages that says what a test wants, and its streamed messages put together.

Promises: replies and events are checked against the documented models. Must not know: torch, sockets.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import httpx

from quire_engine.contract.types import GenerationRequest
from quire_server.dialects.messages.reply import MessageEvent, MessageObject
from quire_server.text.parsing.formats import model_formats
from support.fake_engine import FakeEngine
from support.fake_tokenizer import EOS, load_tokenizer
from support.fakes import connect, make_app, make_state

PATH = "/v1/messages"
# Shows all that a message may bring; the words make the formats of calls and thoughts known.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.city }}</tool_call>"
    "{% endfor %}{% if not loop.last or m.role != 'assistant' %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
ASK: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 300,
    "temperature": 0,
    "messages": [{"role": "user", "content": "hi"}],
}


class Model:
    """A model that says one text after another; the last one for ever."""

    def __init__(self, *texts: str, template: str = TEMPLATE, calls: str = "auto", **state: object) -> None:
        self._texts = texts
        self.engine = FakeEngine(replies=self._said)
        self.state = make_state(engine=self.engine, template=template, **state)
        self.state.model_text = replace(
            self.state.model_text, formats=model_formats(calls, "auto", load_tokenizer(), template)
        )

    @property
    def prompt(self) -> str:
        return load_tokenizer().decode(self.engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)

    def connected(self) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        return connect(make_app(self.state))

    def _said(self, request: GenerationRequest, _: int) -> Sequence[int]:
        number = self.engine.submitted.index(request)
        return (*self._texts[min(number, len(self._texts) - 1)].encode(), EOS)


async def whole(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    reply = await client.post(PATH, json=ASK | fields)
    assert reply.status_code == 200, reply.text
    MessageObject.model_validate_json(reply.content, strict=True)
    body: dict[str, Any] = reply.json()
    return body


async def streamed(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    """The message that a stream's events make."""
    reply = await client.post(PATH, json=ASK | fields | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return rebuilt(parse_events(reply.text))


def parse_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream: framed, named by their type and of the documented form."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        MessageEvent.model_validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def rebuilt(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As clients put it together; blocks must come one after the other."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    is_open = False
    for event in copy.deepcopy(list(events)):
        kind = event["type"]
        if kind == "message_start":
            assert not message
            message = event["message"]
            assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
        elif kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            _grow(message["content"][-1], event["delta"], inputs, event["index"])
        elif kind == "content_block_stop":
            assert is_open
            if event["index"] in inputs:
                message["content"][-1]["input"] = json.loads(inputs[event["index"]])
        elif kind == "message_delta":
            assert not is_open
            message |= event["delta"] | {"usage": event["usage"]}
        is_open = kind in ("content_block_start", "content_block_delta")
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def _grow(block: dict[str, Any], delta: dict[str, Any], inputs: dict[int, str], index: int) -> None:
    match delta["type"]:
        case "input_json_delta":
            assert block["type"] == "tool_use"
            inputs[index] = inputs.get(index, "") + delta["partial_json"]
        case "signature_delta":
            assert not block["signature"]
            block["signature"] = delta["signature"]
        case kind:
            name = kind.removesuffix("_delta")
            assert block["type"] == name
            block[name] += delta[name]
