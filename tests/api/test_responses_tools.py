"""Tools and thoughts through /v1/responses: what the model is told, how its calls come back, an agent's loop."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from quire_engine.types import GenerationRequest
from quire_server.text.parsing.formats import model_formats
from quire_server.text.prompt import ChatTemplate
from support.fake_engine import FakeEngine
from support.fake_tokenizer import EOS, load_tokenizer
from support.fakes import connect, listening, make_app, make_state
from support.responses import parse_events, rebuilt, respond

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.city }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
STORY = f"<think>\nI must look.\n</think>\n\nLet me see.\n{CALL}\n{OTHER}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_weather", "description": "of a city", "parameters": CITY, "strict": False},
    {"type": "function", "name": "get_time", "parameters": None, "strict": None},
]


class Model:
    """A model that says one text after another, with a template that shows tools."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._template = ChatTemplate(TEMPLATE, load_tokenizer())
        self.engine = FakeEngine(replies=self._said)

    def app(self) -> Any:
        state = make_state(engine=self.engine)
        state.prompts = state.text._prompts = self._template
        state.formats = model_formats("auto", "auto", load_tokenizer(), TEMPLATE)
        return make_app(state)

    def prompt(self, number: int = -1) -> str:
        return load_tokenizer().decode(self.engine.submitted[number].prompt_token_ids)

    def _said(self, request: GenerationRequest, _: int) -> Sequence[int]:
        number = self.engine.submitted.index(request)
        return (*self._texts[min(number, len(self._texts) - 1)].encode(), EOS)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[httpx.AsyncClient]:
        try:
            async with connect(self.app()) as client:
                yield client
        finally:
            self._template.close()

    @contextlib.asynccontextmanager
    async def api(self) -> AsyncIterator[openai.AsyncOpenAI]:
        try:
            async with listening(self.app()) as server:
                base_url = f"http://127.0.0.1:{server.port}/v1"
                async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
                    yield api
        finally:
            self._template.close()


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


async def test_thoughts_text_and_calls_are_items() -> None:
    async with Model(STORY).connected() as client:
        reply = await respond(client, tools=TOOLS)
        thought, text, first, second = reply["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "I must look."}]
        assert text["content"][0]["text"] == "Let me see.\n"
        assert (first["name"], json.loads(first["arguments"])) == ("get_weather", {"city": "Zürich"})
        assert (second["name"], json.loads(second["arguments"])) == ("get_time", {})
        assert first["call_id"] != second["call_id"]
        assert first["call_id"].startswith("call_")
        assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 10
        assert reply["status"] == "completed"
        assert [tool["name"] for tool in reply["tools"]] == ["get_weather", "get_time"]
        raw = await client.post("/v1/responses", json={"input": "hi", "tools": TOOLS, "stream": True})
        events = parse_events(raw.text)
        assert without_ids(rebuilt(events)) == without_ids(reply["output"])
        assert rebuilt(events) == events[-1]["response"]["output"]


async def test_text_after_a_call_stays_there() -> None:
    async with Model(f"{CALL}\nDone.").connected() as client:
        reply = await respond(client, tools=TOOLS)
        assert [item["type"] for item in reply["output"]] == ["function_call", "message"]
        raw = await client.post("/v1/responses", json={"input": "hi", "tools": TOOLS, "stream": True})
        assert without_ids(rebuilt(parse_events(raw.text))) == without_ids(reply["output"])


async def test_what_the_model_is_told() -> None:
    model = Model("ok")
    async with model.connected() as client:
        await respond(client, tools=TOOLS)
        told = json.loads(model.prompt().split("\n", 1)[0])
        assert [tool["function"]["name"] for tool in told] == ["get_weather", "get_time"]
        assert told[0] == {
            "type": "function",
            "function": {"name": "get_weather", "description": "of a city", "parameters": CITY},
        }
        one = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
        reply = await respond(client, tools=TOOLS, tool_choice=one)
        assert [tool["function"]["name"] for tool in json.loads(model.prompt().split("\n", 1)[0])] == ["get_time"]
        assert reply["tool_choice"] == one
        await respond(client, tools=TOOLS)
        before = model.prompt()
        await respond(client, tools=TOOLS, tool_choice="none")
        assert model.prompt() == before
        await respond(client, tools=[], tool_choice="auto")
        assert model.prompt() == "[user]hi[assistant]"


async def test_no_call_is_one_where_none_may_be() -> None:
    async with Model(CALL).connected() as client:
        reply = await respond(client, tools=TOOLS, tool_choice="none")
        assert [item["type"] for item in reply["output"]] == ["message"]
        single = await respond(client, tools=TOOLS, parallel_tool_calls=False)
        assert [item["type"] for item in single["output"]] == ["function_call"]
        assert single["parallel_tool_calls"] is False


async def test_a_call_that_is_cut_off() -> None:
    async with Model(CALL).connected() as client:
        reply = await respond(client, tools=TOOLS, max_output_tokens=65)
        (call,) = reply["output"]
        assert (reply["status"], call["status"]) == ("incomplete", "incomplete")
        assert call["arguments"].startswith('{"city"')
        assert not call["arguments"].endswith("}")


async def test_an_agent_without_and_with_the_store() -> None:
    """A call, its output, the answer: once with all items sent back, once by the id of the response before."""
    for by_id in (False, True):
        model = Model(STORY, "It is sunny.")
        async with model.api() as api:
            history: Any = [{"role": "user", "content": "Weather?"}]
            first = await api.responses.create(model="fake", input=history, tools=TOOLS, store=by_id)  # type: ignore[arg-type]
            outputs: Any = [
                {"type": "function_call_output", "call_id": item.call_id, "output": f"of {item.name}"}
                for item in first.output
                if item.type == "function_call"
            ]
            assert len(outputs) == 2
            if by_id:
                second = await api.responses.create(
                    model="fake",
                    input=outputs,
                    tools=TOOLS,  # type: ignore[arg-type]
                    previous_response_id=first.id,
                )
            else:
                history += [item.model_dump(exclude_none=True) for item in first.output] + outputs
                second = await api.responses.create(model="fake", input=history, tools=TOOLS, store=False)  # type: ignore[arg-type]
            assert second.output_text == "It is sunny."
            expected = (
                "[user]Weather?[assistant]<think>I must look.</think>Let me see.\n"
                "<tool_call>get_weather Zürich</tool_call><tool_call>get_time </tool_call>"
                "[tool]of get_weather[tool]of get_time[assistant]"
            )
            assert model.prompt(1).split("\n", 1)[1] == expected
