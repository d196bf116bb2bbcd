"""POST /v1/chat/completions, not streamed: messages, templates, limits, log-probabilities."""

from __future__ import annotations

import httpx
import pytest

from quire_server.dialects.chat.wire import ChatCompletionResponse
from quire_server.text.prompt import ChatTemplate
from support.fake_engine import FakeEngine
from support.fake_tokenizer import CHAT_TEMPLATE, IM_END, load_tokenizer
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}


async def chat(client: httpx.AsyncClient, **fields: object) -> dict:
    reply = await client.post("/v1/chat/completions", json=CHAT | fields)
    assert reply.status_code == 200, reply.text
    ChatCompletionResponse.model_validate_json(reply.content, strict=True)
    return reply.json()


async def run(engine: FakeEngine | None = None, settings: dict | None = None, **fields: object) -> dict:
    async with connect(make_app(engine=engine, **(settings or {}))) as client:
        return await chat(client, **fields)


def prompt_text(engine: FakeEngine) -> str:
    return load_tokenizer().decode(engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)


async def test_the_reply_has_openais_fields() -> None:
    engine = FakeEngine()
    reply = await run(engine)
    unset = ["service_tier", "prompt_logprobs", "prompt_token_ids"]
    assert list(reply) == ["id", "object", "created", "model", "system_fingerprint", "choices", *unset, "usage"]
    assert [reply[name] for name in unset] == [None] * 3
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "The quic",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert reply["usage"]["prompt_tokens"] == len(engine.submitted[0].prompt_token_ids)
    assert prompt_text(engine) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_the_end_of_the_turn_stops() -> None:
    choice = (await run(FakeEngine(replies=lambda request, choice: (*b"yes", IM_END))))["choices"][0]
    assert choice["message"]["content"] == "yes"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", IM_END), "not the tokenizer's own end of text"


async def test_parts_of_text_are_joined() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    await run(engine, messages=[{"role": "user", "content": parts}])
    assert prompt_text(engine).startswith("<|im_start|>user\na\nb<|im_end|>")


async def test_a_developer_is_the_system() -> None:
    engine = FakeEngine()
    await run(engine, messages=[{"role": "developer", "content": "be"}, *CHAT["messages"]])
    assert prompt_text(engine).startswith("<|im_start|>system\nbe<|im_end|>")


async def test_an_answer_can_be_sent_back_as_it_came() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        answer = (await chat(client))["choices"][0]["message"]
        messages = [*CHAT["messages"], answer, {"role": "user", "content": ""}]
        reply = await client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert reply.status_code == 200, reply.text
    assert "x-quire-ignored" not in reply.headers
    assert "<|im_start|>assistant\nThe quic<|im_end|>" in prompt_text(engine)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"q": 1}'}}
SDK_ANSWER = dict.fromkeys(("content", "refusal", "function_call", "audio")) | {"annotations": [], "tool_calls": [CALL]}
HISTORY = [
    {"role": "user", "content": "go"},
    {"role": "assistant", **SDK_ANSWER},
    {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "a"},
    {"role": "assistant", "function_call": {"name": "g", "arguments": "{}"}},
    {"role": "function", "name": "g", "content": "2"},
    {"role": "my critic", "content": "no"},
    {"role": "assistant"},
]
AGENT_TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.q }}{% endfor %}
{%- if m.function_call %}{{ m.function_call.name }}{% endif %}
{%- if m.role in ['tool', 'function', 'my critic'] %}!{% endif %}{% endfor %}"""


async def test_history_as_agents_send_it_reaches_the_template() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine, template=AGENT_TEMPLATE)) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT | {"messages": HISTORY})
    assert reply.status_code == 200, reply.text
    assert prompt_text(engine) == "user:goassistant:f1tool:1!assistant:gfunction:2!my critic:no!assistant:"
    assert "x-quire-notes" not in reply.headers
    assert "x-quire-ignored" not in reply.headers


async def test_what_the_template_does_not_name_is_noted() -> None:
    fields = {"messages": HISTORY, "chat_template_kwargs": {"mood": 1, "a\r\nb: c": 2}}
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        for stream in (False, True):
            reply = await client.post("/v1/chat/completions", json=CHAT | fields | {"stream": stream})
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-quire-notes"] == "; ".join(
                f"the chat template does not name the {what}"
                for what in ("variable mood, ?", "role tool, function, my critic", "field tool_calls, function_call")
            )
        assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n1<|im_end|>" in prompt_text(engine)
        assert "x-quire-notes" not in (await client.post("/v1/chat/completions", json=CHAT)).headers


async def test_what_the_template_refuses_is_a_400_with_its_words() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    )
    async with connect(make_app(template=source)) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT | {"messages": HISTORY})
    assert reply.status_code == 400
    assert "no tools here" in reply.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "none"}])
async def test_no_tools_can_be_said(fields: dict) -> None:
    async with connect(make_app()) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT | fields)
    assert reply.status_code == 200, reply.text
    assert "x-quire-ignored" not in reply.headers


async def test_the_last_message_can_be_continued() -> None:
    engine = FakeEngine()
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Once upon"}]
    await run(engine, messages=messages, continue_final_message=True)
    assert prompt_text(engine).endswith("<|im_start|>assistant\nOnce upon")
    await run(engine, messages=messages, add_generation_prompt=False)
    assert prompt_text(engine).endswith("Once upon<|im_end|>\n")


async def test_template_variables() -> None:
    template = ChatTemplate(CHAT_TEMPLATE + "{{ mood }}{{ reasoning_effort }}", load_tokenizer(), {"mood": "calm"})
    engine = FakeEngine()
    async with connect(make_app(engine=engine, template=template)) as client:
        await chat(client)
        assert prompt_text(engine).endswith("calm")
        reply = await client.post("/v1/chat/completions", json=CHAT | {"reasoning_effort": "low"})
        assert "x-quire-ignored" not in reply.headers
        assert prompt_text(engine).endswith("calmlow")
        await chat(client, chat_template_kwargs={"mood": "wild"})
        assert prompt_text(engine).endswith("wild")


async def test_the_new_name_of_max_tokens_wins() -> None:
    engine = FakeEngine()
    await run(engine, max_tokens=3, max_completion_tokens=5)
    assert engine.submitted[0].stop.max_new_tokens == 5


async def test_the_rest_of_the_context_by_default() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine, max_model_len=64)) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": None})
        assert "x-quire-clamped" not in reply.headers
        assert reply.json()["usage"]["total_tokens"] == 64
        reply = await client.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 900})
        assert reply.headers["x-quire-clamped"] == f"max_completion_tokens={64 - 21}"


async def test_logprobs_have_true_bytes() -> None:
    engine = FakeEngine(replies=lambda request, choice: "é".encode())
    choice = (await run(engine, logprobs=True, top_logprobs=2, max_tokens=2))["choices"][0]
    assert choice["message"]["content"] == "é"
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert [entry["token"] for entry in content] == ["�", "�"]
    assert [top["bytes"] for top in content[0]["top_logprobs"]] == [[0xC3], [0xC4]]
    assert content[0]["top_logprobs"][0] == {"token": "�", "logprob": -0.7, "bytes": [0xC3]}


@pytest.mark.parametrize("top", [None, 0])
async def test_logprobs_without_alternatives(top: int | None) -> None:
    choice = (await run(logprobs=True, top_logprobs=top, max_tokens=2))["choices"][0]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]


async def test_prompt_logprobs_and_ids_stand_beside_the_choices() -> None:
    engine = FakeEngine()
    reply = await run(engine, prompt_logprobs=0, return_token_ids=True, n=2, max_tokens=1)
    ids = list(engine.submitted[0].prompt_token_ids)
    assert reply["prompt_token_ids"] == ids
    assert [None if e is None else int(next(iter(e))) for e in reply["prompt_logprobs"]] == [None, *ids[1:]]
    assert [choice["token_ids"] for choice in reply["choices"]] == [[84], [84]]


async def test_message_fields_without_effect_are_reported() -> None:
    async with connect(make_app()) as client:
        message = {"role": "user", "content": "a", "foo": 1, "refusal": None}
        reply = await client.post("/v1/chat/completions", json=CHAT | {"messages": [message] * 3, "user": "u"})
        assert reply.headers["x-quire-ignored"] == "user, messages.foo"
        reply = await client.post("/v1/chat/completions", json=CHAT | {"reasoning_effort": "low"})
        assert reply.headers["x-quire-ignored"] == "reasoning_effort"


async def test_without_a_template_there_is_no_chat() -> None:
    async with connect(make_app(template=None)) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 400
    assert "/v1/completions" in reply.json()["error"]["message"]


USER = {"role": "user", "content": "a"}
REFUSED = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "a"}),
    ("messages", {"messages": [{}]}),
    ("messages", {"messages": [USER] * 10_000}),
    ("messages", {"messages": [{"role": "", "content": "a"}]}),
    ("messages", {"messages": [{"role": "<|im_start|>", "content": "a"}]}),
    ("messages", {"messages": [{"role": "x" * 65, "content": "a"}]}),
    *[("messages", {"messages": [{"role": r, "content": None}]}) for r in ("user", "system", "developer", "tool")],
    ("messages", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"role": "user", "content": []}]}),
    ("messages", {"messages": [{"role": "user", "content": 5}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    ),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    ("messages", {"messages": [USER, {"role": "assistant", "tool_calls": ["a"]}]}),
    ("messages", {"messages": [USER, {"role": "assistant", "tool_calls": [{}] * 1025}]}),
    ("messages", {"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}]}),
    ("messages", {"messages": [USER, {"role": "tool", "content": "a", "tool_call_id": 1}]}),
    ("tools", {"tools": [{"type": "web_search"}]}),
    ("tools", {"tools": [{}], "tool_choice": "none"}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tool_choice", {"tool_choice": "required", "tools": []}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": -2}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("logprobs", {"logprobs": 1}),
    ("n", {"n": 17}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    ("chat_template", {"chat_template": "{% for i in range(999999999) %}x{% endfor %}"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "x"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tokenize": True}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"__class__": 1}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tools": [{}]}}),
    ("chat_template_kwargs", {"chat_template_kwargs": []}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 600}]}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=lambda value: repr(value)[:60])
async def test_bad_values_name_the_field(param: str, fields: dict) -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT | fields)
    assert reply.status_code == 400, reply.text
    assert len(reply.content) <= 2048
    assert reply.json()["error"]["param"].split("[")[0] == param
    assert engine.submitted == []
