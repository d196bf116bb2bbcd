"""POST /v1/responses: what goes in, what comes out whole, what is refused and what is reported."""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_engine import FakeEngine
from support.fake_tokenizer import load_tokenizer
from support.fakes import connect, make_app
from support.responses import HEAD, TAIL, respond, saying

pytestmark = pytest.mark.anyio

WEATHER = {"type": "function", "name": "get_weather", "description": "of a city", "parameters": {"type": "object"}}


async def prompt_of(**fields: object) -> str:
    """What the model reads."""
    engine = saying()
    async with connect(make_app(engine=engine)) as client:
        await respond(client, **fields)
    return load_tokenizer().decode(engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)


async def refused(status: int = 400, **fields: object) -> dict[str, Any]:
    async with connect(make_app(engine=saying())) as client:
        reply = await client.post("/v1/responses", json={"model": "fake", "input": "hi", **fields})
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


async def test_the_reply() -> None:
    engine = saying()
    async with connect(make_app(engine=engine)) as client:
        reply = await respond(client, temperature=0, metadata={"a": "b"}, user="me")
    assert reply["id"].startswith("resp_")
    (message,) = reply["output"]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}]
    assert (reply["status"], reply["error"], reply["incomplete_details"]) == ("completed", None, None)
    assert (reply["model"], reply["temperature"], reply["top_p"], reply["store"]) == ("fake", 0.0, 1.0, True)
    assert (reply["metadata"], reply["user"], reply["tool_choice"], reply["tools"]) == ({"a": "b"}, "me", "auto", [])
    prompt_tokens = len(engine.submitted[0].prompt_token_ids)
    assert (reply["usage"]["input_tokens"], reply["usage"]["output_tokens"]) == (prompt_tokens, 4)
    assert reply["usage"]["total_tokens"] == prompt_tokens + 4


async def test_steps_of_tools_that_others_ran_are_passed_over_and_named() -> None:
    foreign = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}},
        {"type": "file_search_call", "id": "fs_1", "queries": ["x"], "results": None},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "AAAA"},
    ]
    engine, hello = FakeEngine(), {"type": "message", "role": "user", "content": "hi"}
    async with connect(make_app(engine=engine)) as client:
        reply = await client.post(
            "/v1/responses", json={"model": "fake", "input": [*foreign[:4], hello], "max_output_tokens": 4}
        )
        assert reply.status_code == 200, reply.text
        names = [f"input.{item['type']}" for item in foreign[:4]]
        assert reply.headers["x-quire-ignored"] == ", ".join(names)
        plain = await client.post("/v1/responses", json={"model": "fake", "input": [hello], "max_output_tokens": 4})
        assert engine.submitted[0].prompt_token_ids == engine.submitted[1].prompt_token_ids
        listed = (await client.get(f"/v1/responses/{reply.json()['id']}/input_items")).json()["data"]
        assert [item["type"] for item in listed] == ["message"]
        body = {"previous_response_id": plain.json()["id"], "input": [foreign[0], foreign[4], hello]}
        continued = await client.post("/v1/responses", json=body)
        assert continued.status_code == 200, continued.text


async def test_max_output_tokens() -> None:
    async with connect(make_app(engine=FakeEngine())) as client:
        reply = await respond(client, max_output_tokens=3, temperature=0)
        assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert reply["output"][0]["content"][0]["text"] == "The"
        clamped = await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 5000})
        assert clamped.headers["x-quire-clamped"].startswith("max_output_tokens=")


async def test_sampling_and_stopping() -> None:
    engine = FakeEngine()
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "presence_penalty": 0.5}
    async with connect(make_app(engine=engine)) as client:
        reply = await respond(client, **sampling, stop=["quick"], max_output_tokens=40)
    submitted = engine.submitted[0].sampling
    assert {name: getattr(submitted, name) for name in sampling} == sampling
    assert reply["status"] == "completed" or "quick" not in reply["output"][0]["content"][0]["text"]
    async with connect(make_app(engine=FakeEngine())) as client:
        reply = await respond(client, temperature=0, stop="quick")
    assert reply["output"][0]["content"][0]["text"] == "The "


async def test_log_probabilities() -> None:
    async with connect(make_app(engine=saying())) as client:
        reply = await respond(client, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = reply["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["y", "e", "s"]
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2, 2, 2]
    assert reply["top_logprobs"] == 2


async def test_a_text_and_messages_as_input() -> None:
    assert await prompt_of(input="hi") == f"{HEAD}user\nhi{TAIL}{HEAD}assistant\n"
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"role": "user", "content": "one"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": parts},
    ]
    expected = f"{HEAD}user\none{TAIL}{HEAD}assistant\ntwo{TAIL}{HEAD}user\na\nb{TAIL}{HEAD}assistant\n"
    assert await prompt_of(input=items) == expected


async def test_instructions_come_first_and_take_in_what_the_system_says() -> None:
    items = [{"role": "developer", "content": "short"}, {"role": "user", "content": "hi"}]
    assert await prompt_of(input=items) == f"{HEAD}system\nshort{TAIL}{HEAD}user\nhi{TAIL}{HEAD}assistant\n"
    with_both = await prompt_of(input=items, instructions="kind")
    assert with_both == f"{HEAD}system\nkind\n\nshort{TAIL}{HEAD}user\nhi{TAIL}{HEAD}assistant\n"


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}|{% endif %}{% for m in messages %}{{ m.role }}({{ m.content }}"
    "{% if m.reasoning %} thinks {{ m.reasoning }}{% endif %}"
    "{% for c in m.tool_calls or [] %} calls {{ c.id }} {{ c.function.name }} {{ c.function.arguments.x }}{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }} {{ m.name }}{% endif %}){% endfor %}"
)


async def test_calls_outputs_and_thoughts_of_earlier_turns() -> None:
    engine, tokenizer = saying(), load_tokenizer()
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "id": "rs_1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I see."}], "id": "msg_1"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    async with connect(make_app(engine=engine, template=TEMPLATE)) as client:
        await respond(client, input=items)
    prompt = tokenizer.decode(engine.submitted[0].prompt_token_ids)
    assert prompt == (
        "user(hi)assistant(I see. thinks hm calls c1 f 1 calls c2 g 2)tool(sun for c1 f)tool(rain for c2 g)"
    )


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{}]}, "input[0]", "item_type"),
        ({"input": [3]}, "input[0]", "item_type"),
        ({"input": [{"type": "massage", "id": "x"}]}, "input", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "unsupported_parameter"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "invalid_value"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "x"}}, "prompt", "unsupported_parameter"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "unsupported_parameter"),
        ({"max_tokens": 3}, "max_tokens", "unsupported_parameter"),
        ({"messages": []}, "messages", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": -2}, "max_output_tokens", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
        ({"truncation": "middle"}, "truncation", "invalid_value"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "maybe"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "unsupported_parameter"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_value"),
    ],
)
async def test_refused(fields: dict[str, Any], param: str, code: str) -> None:
    error = await refused(**fields)
    assert (error["param"], error["code"]) == (param, code if code != "item_type" else "invalid_value")
    assert error["message"]


async def test_unknown_ids() -> None:
    error = await refused(404, previous_response_id="resp_x")
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    error = await refused(404, input=[{"type": "item_reference", "id": "msg_x"}])
    assert (error["code"], error["param"]) == ("item_not_found", "input")
    assert (await refused(404, model="gpt-5"))["code"] == "model_not_found"


async def test_a_prompt_that_is_too_long() -> None:
    assert (await refused(input="x" * 600))["code"] == "context_length_exceeded"
    async with connect(make_app(engine=saying())) as client:
        reply = await respond(client, input="x" * 600, truncation="auto", max_output_tokens=12)
    assert reply["usage"]["input_tokens"] == 500


async def test_what_is_without_effect_is_reported() -> None:
    fields = {
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "user": "me",
        "frob": 1,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "stream": False,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "cache_control": {}}], "mood": 1}],
    }
    async with connect(make_app(engine=saying())) as client:
        reply = await client.post("/v1/responses", json=fields)
        assert reply.status_code == 200
        names = reply.headers["x-quire-ignored"].split(", ")
        assert sorted(names) == sorted(
            [
                *("user", "frob", "include.reasoning.encrypted_content", "reasoning.summary", "text.verbosity"),
                *("input.mood", "input.content.cache_control"),
            ]
        )
        plain = await client.post("/v1/responses", json={"input": "hi", "store": True, "background": False, "n": 1})
        assert "x-quire-ignored" not in plain.headers


async def test_input_tokens() -> None:
    engine = saying()
    async with connect(make_app(engine=engine)) as client:
        reply = await client.post("/v1/responses/input_tokens", json={"input": "hi", "instructions": "be"})
        assert engine.submitted == []
        whole = await respond(client, instructions="be")
        assert reply.json() == {"object": "response.input_tokens", "input_tokens": whole["usage"]["input_tokens"]}
        long = await client.post("/v1/responses/input_tokens", json={"input": "x" * 600})
        assert long.json()["input_tokens"] > 600  # also of what would not fit


async def test_chat_input_tokens() -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with connect(make_app(engine=saying())) as client:
        reply = await client.post("/v1/chat/completions/input_tokens", json={"messages": messages})
        whole = await client.post("/v1/chat/completions", json={"messages": messages})
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": whole.json()["usage"]["prompt_tokens"]}
