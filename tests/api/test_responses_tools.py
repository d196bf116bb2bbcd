"""Tools and thoughts through /v1/responses: what the model is told, how its calls come back, an agent's loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from quire_engine.contract.types import GenerationRequest
from quire_server.text.parsing.formats import model_formats
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
        self.engine = FakeEngine(replies=self._said)

    def app(self) -> Any:
        state = make_state(engine=self.engine, max_model_len=1500, template=TEMPLATE)
        state.model_text = replace(state.model_text, formats=model_formats("auto", "auto", load_tokenizer(), TEMPLATE))
        return make_app(state)

    def prompt(self, number: int = -1) -> str:
        return load_tokenizer().decode(self.engine.submitted[number].prompt_token_ids)

    def _said(self, request: GenerationRequest, _: int) -> Sequence[int]:
        number = self.engine.submitted.index(request)
        return (*self._texts[min(number, len(self._texts) - 1)].encode(), EOS)

    def connected(self) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        return connect(self.app())

    @asynccontextmanager
    async def api(self) -> AsyncIterator[openai.AsyncOpenAI]:
        async with listening(self.app()) as server:
            base_url = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
                yield api


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


PATCH = 'start: "*** " /[^\\n]+/ LF\n%import common.LF'
NESTED: list[dict[str, Any]] = [
    {"type": "namespace", "name": "agents", "description": "Of agents.", "tools": [TOOLS[0], {**TOOLS[1], "x": 1}]},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
    },
    {"type": "custom", "name": "say"},
    {"type": "web_search", "external_web_access": False},
]
EDIT = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** \\"é\\ud83d\\ude00\\"\\n"}}\n</tool_call>'
AGENT = '<tool_call>\n{"name": "agents__get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


async def test_namespaces_and_custom_tools_are_functions_to_the_model() -> None:
    model = Model(f"{AGENT}\n{EDIT}")
    async with model.connected() as client:
        raw = await client.post("/v1/responses", json={"input": "hi", "tools": NESTED})
        assert raw.status_code == 200, raw.text
        assert raw.headers["x-quire-ignored"] == "tools.x, tools.web_search"
        told = {tool["function"]["name"]: tool["function"] for tool in json.loads(model.prompt().split("\n", 1)[0])}
        assert list(told) == ["agents__get_weather", "agents__get_time", "apply_patch", "say"]
        assert told["agents__get_weather"]["parameters"] == CITY
        assert told["agents__get_weather"]["description"] == "Of agents.\n\nof a city"
        assert "description" not in told["agents__get_time"]
        assert (
            told["apply_patch"]["description"] == f"Edits files.\n\nThe input is a text of this Lark grammar:\n{PATCH}"
        )
        assert told["say"]["parameters"]["required"] == ["input"]
        assert "%lark" in model.engine.submitted[-1].sampling.grammar
        reply = raw.json()
        first, second = reply["output"]
        assert (first["type"], first["namespace"], first["name"]) == ("function_call", "agents", "get_weather")
        assert json.loads(first["arguments"]) == {"city": "Zürich"}
        assert (second["type"], second["name"], second["input"]) == (
            "custom_tool_call",
            "apply_patch",
            '*** "é\U0001f600"\n',
        )
        assert "namespace" not in second
        assert [tool["type"] for tool in reply["tools"]] == ["namespace", "custom", "custom", "web_search"]
        assert reply["tools"][2]["format"] == {"type": "text"}
        streamed = await client.post("/v1/responses", json={"input": "hi", "tools": NESTED, "stream": True})
        events = parse_events(streamed.text)
        assert without_ids(rebuilt(events)) == without_ids(reply["output"])
        deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
        assert len(deltas) > 5, "the input comes while it is written"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{ "input" : "a\\tb" }', "a\tb"),
        ('{"input": "a\nb"}', "a\nb"),  # a line end that JSON would have escaped
        ('{"input": "\\ud83d!"}', ""),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 1}', '{"input": 1}'),
        ('{"other": 1, "input": "x"}', "x"),
    ],
)
async def test_an_input_however_it_is_written(arguments: str, text: str) -> None:
    said = f'<tool_call>\n{{"name": "say", "arguments": {arguments}}}\n</tool_call>'
    async with Model(said).connected() as client:
        reply = await respond(client, tools=[NESTED[2]])
        (call,) = reply["output"]
        assert (call["type"], call["input"]) == ("custom_tool_call", text)
        raw = await client.post("/v1/responses", json={"input": "hi", "tools": [NESTED[2]], "stream": True})
        assert without_ids(rebuilt(parse_events(raw.text))) == without_ids(reply["output"])


async def test_an_input_that_is_cut_off() -> None:
    async with Model(EDIT).connected() as client:
        reply = await respond(client, tools=NESTED, max_output_tokens=66)
        (call,) = reply["output"]
        assert (reply["status"], call["status"], call["input"]) == ("incomplete", "incomplete", '*** "')


@pytest.mark.parametrize("by_id", [False, True])
async def test_an_agent_sends_its_calls_and_their_outputs_back(by_id: bool) -> None:
    model = Model(f"{AGENT}\n{EDIT}", "Done.")
    async with model.connected() as client:
        first = await respond(client, tools=NESTED, store=by_id)
        outputs = [
            {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "sunny"},
            {
                "type": "custom_tool_call_output",
                "call_id": first["output"][1]["call_id"],
                "name": "apply_patch",
                "output": [{"type": "input_text", "text": "ok"}],
            },
        ]
        if by_id:
            await respond(client, input=outputs, tools=NESTED, previous_response_id=first["id"])
        else:
            history = [{"role": "user", "content": "hi"}, *first["output"], *outputs]
            await respond(client, input=history, tools=NESTED, store=False)
        assert model.prompt().split("\n", 1)[1] == (
            "[user]hi[assistant]<tool_call>agents__get_weather Zürich</tool_call><tool_call>apply_patch </tool_call>"
            "[tool]sunny[tool]ok[assistant]"
        )


async def test_a_custom_tool_that_must_be_called() -> None:
    model = Model(EDIT)
    async with model.connected() as client:
        await respond(client, tools=NESTED, tool_choice={"type": "custom", "name": "apply_patch"})
        assert "agents__" not in model.engine.submitted[-1].sampling.grammar
        chosen = {"type": "function", "name": "get_time", "namespace": "agents"}
        reply = await respond(client, tools=NESTED, tool_choice=chosen)
        assert reply["tool_choice"] == chosen
        assert "agents__get_time" in model.engine.submitted[-1].sampling.grammar


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "web_search"}, "this server asks no other"),
        ({"type": "web_search", "external_web_access": 1}, "external_web_access"),
        ({"type": "mcp"}, "function, custom, namespace, web_search are"),
        ({**NESTED[1], "format": {"type": "grammar", "syntax": "lark", "definition": "start: %json {}"}}, "%json"),
        (
            {**NESTED[1], "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
            "cannot be enforced",
        ),
        ({"type": "namespace", "name": "a", "tools": [TOOLS[0], TOOLS[0]]}, "'a__get_weather'"),
    ],
)
async def test_tools_that_are_refused(tool: dict[str, Any], words: str) -> None:
    async with Model("x").connected() as client:
        reply = await client.post("/v1/responses", json={"input": "hi", "tools": [tool]})
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"].startswith("tools")


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
