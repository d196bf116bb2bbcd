"""Calls of tools and thoughts in chat replies: whole and streamed the same, in the shapes that the SDKs read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from quire_engine.contract.types import GenerationRequest
from quire_server.dialects.chat.wire import ChatCompletionChunk, ChatCompletionResponse
from quire_server.text.parsing.formats import TOOL_FORMATS, model_formats
from quire_server.text.prompt import ChatTemplate
from quire_server.text.tokenizer import TextTokenizer
from support.events import parse_events
from support.fake_engine import FakeEngine
from support.fake_tokenizer import CHAT_TEMPLATE, EOS, load_tokenizer, write_tokenizer
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
HERMES = CHAT_TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}{# <tool_call> <think> </think> #}"
SWITCHED = HERMES + "{% if enable_thinking %}{% endif %}"
OPENING = HERMES.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_time"}},
]
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 400}


class Model:
    """A model that says `text`, with a template that may show tools."""

    def __init__(
        self,
        text: str,
        template: str = HERMES,
        tokenizer: TextTokenizer | None = None,
        variants: dict[str, str] | None = None,
    ) -> None:
        self.engine = FakeEngine(replies=self.said)
        known = tokenizer or load_tokenizer()
        self._ids = [*known.encode(text, add_special_tokens=False), EOS]
        own = ChatTemplate(template, known, variants=variants) if tokenizer or variants else template
        state = make_state(engine=self.engine, template=own)
        state.model_text = replace(
            state.model_text,
            tokenizer=known,
            formats=model_formats("auto", "auto", known, template),
            named_formats={
                name: model_formats("auto", "auto", known, source) for name, source in (variants or {}).items()
            },
        )
        self._app = make_app(state)

    def said(self, _: GenerationRequest, __: int) -> Sequence[int]:
        return self._ids

    @property
    def prompt(self) -> str:
        return load_tokenizer().decode(self.engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)

    async def post(self, **fields: object) -> httpx.Response:
        async with connect(self._app) as client:
            return await client.post("/v1/chat/completions", json=CHAT | fields)

    async def whole(self, **fields: object) -> dict:
        reply = await self.post(**fields)
        assert reply.status_code == 200, reply.text
        ChatCompletionResponse.model_validate_json(reply.content, strict=True)
        return reply.json()

    async def streamed(self, **fields: object) -> dict:
        """The whole reply's message and finish reason, put together as clients do."""
        reply = await self.post(stream=True, stream_options={"include_usage": True}, **fields)
        message: dict = {"content": "", "reasoning": "", "tool_calls": []}
        finish, usage = None, None
        for chunk in parse_events(reply.text):
            ChatCompletionChunk.model_validate(chunk, strict=True)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
                delta = choice["delta"]
                assert delta.get("reasoning") == delta.get("reasoning_content")
                message["content"] += delta.get("content") or ""
                message["reasoning"] += delta.get("reasoning") or ""
                for call in delta.get("tool_calls", ()):
                    if call["index"] == len(message["tool_calls"]):
                        message["tool_calls"].append(
                            {"id": call["id"], "type": call["type"], "function": dict(call["function"])}
                        )
                    else:
                        assert set(call) == {"index", "function"}
                        message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        return {"message": message, "finish_reason": finish, "usage": usage}


def calls_of(message: dict) -> list[tuple[str, object]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"] or ()
    ]


WEATHER = ("get_weather", {"city": "Zürich", "days": [1, 2]})
TIME = ("get_time", {})


@pytest.mark.parametrize(
    ("said", "fields", "content", "calls", "finish"),
    [
        (CALL, {}, None, [WEATHER], "tool_calls"),
        (f"I look.\n{CALL}\n{OTHER}", {}, "I look.\n", [WEATHER, TIME], "tool_calls"),
        (f"{CALL}\n{OTHER}", {"parallel_tool_calls": False}, None, [WEATHER], "tool_calls"),
        ("Just <b>text</b>.", {}, "Just <b>text</b>.", [], "stop"),
        (OTHER, {"tool_choice": {"type": "function", "function": {"name": "get_time"}}}, None, [TIME], "stop"),
        (OTHER, {"tool_choice": "none"}, OTHER, [], "stop"),
    ],
)
async def test_whole_and_streamed_replies_have_the_same_calls(
    said: str, fields: dict, content: str | None, calls: list, finish: str
):
    model = Model(said)
    whole = (await model.whole(tools=TOOLS, **fields))["choices"][0]
    streamed = await model.streamed(tools=TOOLS, **fields)
    assert (whole["message"]["content"], calls_of(whole["message"]), whole["finish_reason"]) == (content, calls, finish)
    assert (streamed["message"]["content"] or None) == content
    assert calls_of(streamed["message"]) == calls
    assert streamed["finish_reason"] == finish
    ids = [call["id"] for call in whole["message"]["tool_calls"] or ()]
    assert len(set(ids)) == len(calls)
    assert all(id_.startswith("call_") for id_ in ids)


GPT_OSS = HERMES.replace("{# <tool_call> <think> </think> #}", "{# <|channel|>analysis<|message|> #}")
GEMMA = HERMES.replace("{# <tool_call> <think> </think> #}", "{# <|tool_call>call: <|channel> <channel|> #}")
IN_CHANNELS = (
    "<|channel|>analysis<|message|>Hm.<|call|><|start|>assistant<|channel|>commentary<|message|>I look.<|call|>"
    '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Zürich", '
    '"days": [1, 2]}'
)
IN_GEMMA = "<|channel>thought\nHm.\n<channel|>I look."
IN_GEMMA += '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:[1,2]}<tool_call|>'


@pytest.mark.parametrize(
    ("said", "template", "form"),
    [(IN_CHANNELS, GPT_OSS, "openai"), (IN_GEMMA, GEMMA, "gemma4")],
    ids=["gpt-oss", "gemma"],
)
async def test_marks_that_are_special_tokens_reach_the_parser_and_no_client(
    said: str, template: str, form: str, tmp_path: Path
):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    marks = [*TOOL_FORMATS[form].markers, "<|channel>", "<channel|>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = Model(said, template, TextTokenizer.load(tmp_path))
    whole = (await model.whole(tools=TOOLS))["choices"][0]
    streamed = await model.streamed(tools=TOOLS)
    plain = (await model.whole())["choices"][0]["message"]
    for message in (whole["message"], streamed["message"]):
        assert (message["reasoning"], message["content"], calls_of(message)) == ("Hm.", "I look.", [WEATHER])
    assert (whole["finish_reason"], streamed["finish_reason"]) == ("tool_calls", "tool_calls")
    assert streamed["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    # No tools were offered: what is written to one is no call, and is not shown with marks.
    assert plain["content"].startswith("I look.")
    assert not plain["tool_calls"]
    assert "<|" not in plain["content"]


@pytest.mark.parametrize("template", [HERMES, CHAT_TEMPLATE])
async def test_the_prompt_is_the_same_where_no_tool_may_be_called(template: str):
    """As in an agent's last turn, whose prefix is then the cached one of the turns before."""
    model = Model("ok", template)
    await model.whole(tools=TOOLS)
    before = model.prompt
    assert "get_weather" in before
    await model.whole(tools=TOOLS, tool_choice="none")
    assert model.prompt == before


async def test_a_model_without_a_place_for_tools_is_told_in_words():
    model = Model('{"name": "get_time", "parameters": {"zone": "CET"}}', CHAT_TEMPLATE)
    whole = (await model.whole(tools=TOOLS))["choices"][0]
    assert "You can call functions." in model.prompt
    assert calls_of(whole["message"]) == [("get_time", {"zone": "CET"})]
    assert whole["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("opens", [False, True])
async def test_thoughts_are_told_from_the_answer(opens: bool):
    said = "I think 🤔.\n</think>\n\nIt is 4."
    model = Model(said if opens else f"<think>\n{said}", OPENING if opens else HERMES)
    reply = await model.whole()
    message = reply["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I think 🤔.", "It is 4.")
    assert message["reasoning_content"] == message["reasoning"]
    streamed = await model.streamed()
    assert (streamed["message"]["reasoning"], streamed["message"]["content"]) == ("I think 🤔.", "It is 4.")
    counted = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < counted < reply["usage"]["completion_tokens"]
    assert streamed["usage"] == reply["usage"]
    hidden = (await model.whole(include_reasoning=False))["choices"][0]["message"]
    assert "reasoning" not in hidden
    assert hidden["content"] == "It is 4."


async def test_thoughts_come_before_calls():
    model = Model(f"<think>\nWeather.\n</think>\n\n{CALL}")
    message = (await model.whole(tools=TOOLS))["choices"][0]["message"]
    assert (message["reasoning"], message["content"], calls_of(message)) == ("Weather.", None, [WEATHER])


async def test_stop_strings_are_looked_for_in_the_answer_only():
    model = Model("<think>\nstop here\n</think>\n\nGo on, stop here")
    choice = (await model.whole(stop=["stop"]))["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("Go on, ", "stop")
    assert choice["message"]["reasoning"] == "stop here"


async def test_the_engine_is_told_how_long_to_think():
    model = Model("x", OPENING)
    await model.whole(max_reasoning_tokens=7)
    thinking = model.engine.submitted[-1].sampling.thinking
    assert thinking is not None
    assert (thinking.max_tokens, thinking.is_open, bytes(thinking.end_ids)) == (7, True, b"</think>")
    plain = Model("x", CHAT_TEMPLATE)
    reply = await plain.post(max_reasoning_tokens=7)
    assert reply.headers["x-quire-ignored"] == "max_reasoning_tokens"


@pytest.mark.parametrize(
    ("template", "fields", "may_think"),
    [
        (SWITCHED, {}, False),  # the mark is no token here: the engine could not tell it from the answer
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": True}}, True),
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        (SWITCHED, {"reasoning_effort": "high"}, True),
        (SWITCHED, {"reasoning_effort": "none"}, False),
        (SWITCHED, {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
        (HERMES, {"reasoning_effort": "high"}, False),  # without effect
        (HERMES, {"chat_template_kwargs": {"enable_thinking": True}}, False),
        (OPENING, {}, True),
        (OPENING, {"chat_template_kwargs": {"enable_thinking": False}}, True),  # the prompt is open all the same
    ],
)
async def test_a_constrained_answer_has_thoughts_before_it_where_they_are_asked_for(
    template: str, fields: dict, may_think: bool
):
    model = Model("yes", template)
    await model.whole(guided_choice=["yes", "no"], **fields)
    sampling = model.engine.submitted[-1].sampling
    assert ("thoughts" in sampling.grammar) == may_think
    assert sampling.thinking_opener is None


async def test_where_nothing_is_asked_the_engine_is_told_of_the_mark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TextTokenizer, "token_id", lambda _, text: {"<think>": 7, "</think>": 8}.get(text))
    model = Model("yes", SWITCHED)
    await model.whole(tools=TOOLS, tool_choice="required")
    sampling = model.engine.submitted[-1].sampling
    assert (sampling.thinking_opener, "thoughts" in sampling.grammar) == (7, True)
    for fields in ({"reasoning_effort": "none"}, {"max_reasoning_tokens": 0}):
        await model.whole(tools=TOOLS, tool_choice="required", **fields)
        sampling = model.engine.submitted[-1].sampling
        assert (sampling.thinking_opener, "thoughts" in sampling.grammar) == (None, False)
    await model.whole(tools=TOOLS)  # no grammar, nothing to be opened beside
    assert model.engine.submitted[-1].sampling.thinking_opener is None


async def test_what_follows_a_stop_string_is_no_call():
    """Also where the engine makes several tokens at once, as many as it can."""
    model = Model(f"So STOP {CALL}")
    model.engine.tokens_per_step = 400
    choice = (await model.whole(tools=TOOLS, stop=["STOP"]))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So ", "stop")
    assert choice["message"]["tool_calls"] is None


async def test_requests_with_tools_get_the_template_for_tools_and_its_format_of_calls() -> None:
    model = Model(f"I see. {CALL}", CHAT_TEMPLATE, variants={"tool_use": "TOOLUSE" + HERMES, "rag": "RAG" + HERMES})
    message = (await model.whole(tools=TOOLS))["choices"][0]["message"]
    assert model.prompt.startswith("TOOLUSE")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    message = (await model.whole())["choices"][0]["message"]
    assert not model.prompt.startswith("TOOLUSE")
    assert message["content"].endswith("</tool_call>")
    await model.whole(tools=TOOLS, chat_template="rag")
    assert model.prompt.startswith("RAG")
    await model.whole(tools=TOOLS, chat_template="default")
    assert "You can call functions" in model.prompt  # a template without a place for tools
    refused = await model.post(chat_template="{{ 1 }}")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "chat_template", "unsupported_parameter")
    assert "'default', 'tool_use', 'rag'" in error["message"]


async def test_tokens_are_those_of_the_template_for_tools() -> None:
    state = make_state(template=ChatTemplate(CHAT_TEMPLATE, load_tokenizer(), variants={"tool_use": "TOOLUSE"}))
    body = {"messages": CHAT["messages"], "tools": TOOLS}
    async with connect(make_app(state)) as client:
        for more, is_for_tools in (({}, True), ({"chat_template": "default"}, False), ({"tools": None}, False)):
            reply = await client.post("/tokenize", json=body | more)
            text = load_tokenizer().decode(reply.json()["tokens"], skip_special_tokens=False)
            assert (text == "TOOLUSE") is is_for_tools
        assert (await client.post("/tokenize", json=body | {"chat_template": "x"})).status_code == 400
