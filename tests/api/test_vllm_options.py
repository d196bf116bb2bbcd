"""What vLLM's clients and operators may ask for: a chat's echo, documents, usage in every stream, more alternatives."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.events import parse_events
from support.fake_engine import FakeEngine
from support.fake_tokenizer import CHAT_TEMPLATE, load_tokenizer
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAY = [{"role": "user", "content": "hi"}]
BEGUN = [*SAY, {"role": "assistant", "content": "Well, "}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


async def post(path: str, fields: dict[str, Any], status: int = 200, **settings: object) -> httpx.Response:
    async with connect(make_app(**settings)) as client:
        reply = await client.post(path, json=GREEDY | fields)
    assert reply.status_code == status, reply.text
    return reply


def said(reply: httpx.Response) -> list[str]:
    """The contents of a streamed chat's first choice, piece by piece."""
    chunks = parse_events(reply.text)
    return [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"][:1]]


@pytest.mark.parametrize("content", ["Well, ", [{"type": "text", "text": "We"}, {"type": "text", "text": "ll, "}]])
async def test_an_echo_begins_with_the_message_that_is_continued(content: object) -> None:
    fields = {"messages": [*SAY, {"role": "assistant", "content": content}], "continue_final_message": True}
    plain = (await post(CHAT, fields)).json()["choices"][0]["message"]["content"]
    whole = (await post(CHAT, fields | {"echo": True, "n": 2})).json()["choices"]
    assert [choice["message"]["content"] for choice in whole] == ["Well, " + plain] * 2
    streamed = said(await post(CHAT, fields | {"echo": True, "stream": True}))
    assert (streamed[0], "".join(streamed)) == ("Well, ", "Well, " + plain)


async def test_there_is_nothing_to_echo_of_a_users_message() -> None:
    plain = (await post(CHAT, {"messages": SAY})).json()["choices"]
    assert (await post(CHAT, {"messages": SAY, "echo": True})).json()["choices"] == plain


async def test_documents_are_a_variable_of_the_chat_template() -> None:
    engine = FakeEngine()
    source = CHAT_TEMPLATE + "{% for each in documents or [] %}[{{ each.title }}: {{ each.text }}]{% endfor %}"
    documents = [{"title": "a", "text": "one"}, {"title": "b", "text": "two"}]
    async with connect(make_app(engine=engine, template=source)) as client:
        reply = await client.post(CHAT, json=GREEDY | {"messages": SAY, "documents": documents})
        assert "x-quire-ignored" not in reply.headers
        assert "x-quire-notes" not in reply.headers
        await client.post(CHAT, json=GREEDY | {"messages": SAY, "documents": []})
    prompts = [load_tokenizer().decode(each.prompt_token_ids) for each in engine.submitted]
    assert prompts[0].endswith("[a: one][b: two]")
    assert "[" not in prompts[1]


async def test_documents_that_the_template_does_not_show_are_named() -> None:
    reply = await post(CHAT, {"messages": SAY, "documents": [{"text": "a"}]})
    assert "documents" in reply.headers["x-quire-notes"]


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"messages": SAY}), (TEXT, {"prompt": "hi"})])
@pytest.mark.parametrize("asked", [None, {"include_usage": False}, {"include_usage": True}])
async def test_the_operator_may_have_usage_in_every_stream(path: str, fields: dict[str, Any], asked: object) -> None:
    fields = fields | {"stream": True, "stream_options": asked}
    for forced in (False, True):
        *chunks, last = parse_events((await post(path, fields, enable_force_include_usage=forced)).text)
        is_told = forced or asked == {"include_usage": True}
        assert ("usage" in last, not last["choices"]) == (is_told, is_told)
        assert not is_told or last["usage"]["completion_tokens"] == 4
        assert ["usage" in chunk for chunk in chunks] == [forced] * len(chunks)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if forced]
        assert counts == sorted(counts)


async def test_the_operator_may_allow_more_alternatives() -> None:
    fields = {"messages": SAY, "logprobs": True, "top_logprobs": 50}
    error = (await post(CHAT, fields, 400)).json()["error"]
    assert (error["param"], error["message"]) == ("top_logprobs", "'top_logprobs' must be at most 20 on this server.")
    for most in (50, -1):
        for token in (await post(CHAT, fields, max_logprobs=most)).json()["choices"][0]["logprobs"]["content"]:
            assert len(token["top_logprobs"]) == 50
    echoed = {"prompt": "hello", "echo": True, "logprobs": 100, "max_tokens": 0, "return_tokens_as_token_ids": True}
    tops = (await post(TEXT, echoed, max_logprobs=-1)).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert [len(top) for top in tops[1:]] == [100] * 4
    error = (await post(TEXT, {"prompt": "a", "logprobs": 257}, 400, max_logprobs=-1)).json()["error"]
    assert error["param"] == "logprobs"
