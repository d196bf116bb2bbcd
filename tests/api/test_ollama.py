"""Ollama's routes: chats, prompts, streams of lines, tools, thinking, vectors, lists; its errors in its envelope."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import httpx
import ollama
import pytest
from fastapi import FastAPI

from quire_server.dialects.ollama.reply import ChatReply, EmbedReply, GenerateReply
from quire_server.errors import Unsupported
from quire_server.text.parsing.formats import model_formats
from support.documents import section
from support.fake_engine import FakeEngine
from support.fake_tokenizer import CHAT_TEMPLATE, EOS, load_tokenizer
from support.fakes import connect, make_app, make_state
from support.fim_tokenizers import fim_state
from support.plans import changed

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hi"}]
EIGHT = {"num_predict": 8, "temperature": 0}


def lines_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_a_chat_and_its_stream_agree() -> None:
    body = {"model": "fake", "messages": HELLO, "options": EIGHT}
    async with connect(make_app()) as client:
        whole = (await client.post("/api/chat", json={**body, "stream": False})).json()
        lines = lines_of(await client.post("/api/chat", json=body))  # streamed by default
        openai = (
            await client.post(
                "/v1/chat/completions", json={"model": "fake", "messages": HELLO, "max_tokens": 8, "temperature": 0}
            )
        ).json()
    ChatReply.model_validate(whole)
    for line in lines:
        ChatReply.model_validate(line)
        assert line["message"]["role"] == "assistant"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    text = "".join(line["message"]["content"] for line in lines)
    assert text == whole["message"]["content"] == openai["choices"][0]["message"]["content"]
    for last in (whole, lines[-1]):
        assert (last["done_reason"], last["eval_count"]) == ("length", 8)
        assert last["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
        assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"]
        assert last["model"] == "fake"


async def test_durations_of_a_whole_reply_are_those_of_its_stream() -> None:
    step = 0.01
    body = {"model": "fake", "prompt": "hi", "options": EIGHT}
    async with connect(make_app(engine=FakeEngine(step_seconds=step))) as client:
        whole = (await client.post("/api/generate", json={**body, "stream": False})).json()
        last = lines_of(await client.post("/api/generate", json=body))[-1]
    for reply in (whole, last):
        assert reply["eval_duration"] >= 6.5e9 * step, "seven of the eight tokens come after the first"
        assert reply["total_duration"] >= reply["prompt_eval_duration"] + reply["eval_duration"]


async def test_a_prompt_goes_through_the_template_unless_it_is_raw() -> None:
    engine = FakeEngine()
    tokenizer = load_tokenizer()

    def prompt() -> str:
        return tokenizer.decode(engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)

    async with connect(make_app(engine=engine)) as client:
        body = {"model": "fake", "prompt": "hi", "options": EIGHT, "stream": False}
        whole = (await client.post("/api/generate", json={**body, "system": "be brief"})).json()
        GenerateReply.model_validate(whole)
        assert "be brief" in prompt()
        chat = [{"role": "system", "content": "be brief"}, *HELLO]
        await client.post("/api/chat", json={"model": "fake", "messages": chat, "options": EIGHT, "stream": False})
        assert engine.submitted[-1].prompt_token_ids == engine.submitted[-2].prompt_token_ids
        await client.post("/api/generate", json={**body, "raw": True})
        assert prompt().removeprefix("<|bos|>") == "hi"
        lines = lines_of(await client.post("/api/generate", json={**body, "stream": True}))
        assert "".join(line["response"] for line in lines) == whole["response"]
    async with connect(make_app(engine=engine, template=None)) as client:
        assert (await client.post("/api/generate", json=body)).status_code == 200
        assert prompt().removeprefix("<|bos|>") == "hi"
        refused = await client.post("/api/chat", json={"model": "fake", "messages": HELLO})
        assert refused.status_code == 400
        assert "no chat template" in refused.json()["error"]


async def test_options_become_the_engines() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        options = {
            **{"temperature": 0.5, "top_k": 3, "top_p": 0.7, "min_p": 0.1, "seed": 5, "num_predict": 6},
            **{"repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "stop": ["@@"]},
        }
        await client.post("/api/generate", json={"model": "fake", "prompt": "a", "options": options, "stream": False})
        sampling, stop = engine.submitted[-1].sampling, engine.submitted[-1].stop
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.7, 0.1)
        assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.2, 0.1)
        assert stop.max_new_tokens == 6
        await client.post("/api/generate", json={"model": "fake", "prompt": "a", "stream": False})
        plain = engine.submitted[-1].sampling
        assert (plain.temperature, plain.top_k, plain.top_p) == (0.8, 40, 0.9)


async def test_what_concerns_loading_is_reported() -> None:
    async with connect(make_app()) as client:
        body = {
            "model": "fake",
            "prompt": "a",
            "stream": False,
            "keep_alive": "5m",
            "options": {"num_ctx": 4096, "num_predict": 1},
        }
        reply = await client.post("/api/generate", json=body)
        assert reply.headers["x-quire-ignored"] == "keep_alive, options.num_ctx"
        for kept in (1e-6, 3e20):
            reply = await client.post("/api/generate", json=body | {"keep_alive": kept})
            assert (reply.status_code, reply.headers["x-quire-ignored"]) == (200, "keep_alive, options.num_ctx")
        for kept in (-1, "-1"):
            reply = await client.post(
                "/api/generate", json={"model": "fake", "prompt": "a", "stream": False, "keep_alive": kept}
            )
            assert "x-quire-ignored" not in reply.headers
        for path, content in (
            ("chat", {"message": {"role": "assistant", "content": ""}}),
            ("generate", {"response": ""}),
        ):
            loaded = (await client.post(f"/api/{path}", json={"model": "fake"})).json()
            assert loaded["done_reason"] == "load"
            assert loaded.items() >= content.items()


HERMES = CHAT_TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}{# <tool_call> <think> </think> #}"


def hermes(text: str) -> FastAPI:
    """An app whose model says this, with a template that shows tools and thoughts."""
    tokenizer = load_tokenizer()
    ids = (*tokenizer.encode(text, add_special_tokens=False), EOS)
    state = make_state(engine=FakeEngine(replies=lambda request, choice: ids), template=HERMES)
    state.model_text = replace(state.model_text, formats=model_formats("auto", "auto", tokenizer, HERMES))
    return make_app(state)


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


async def test_calls_are_whole_objects_also_in_a_stream() -> None:
    body = {"model": "fake", "messages": HELLO, "tools": [TOOL], "options": {"temperature": 0}}
    async with connect(hermes(f"<think>\nHm.\n</think>\n<tool_call>\n{CALL}\n</tool_call>")) as client:
        whole = (await client.post("/api/chat", json={**body, "stream": False})).json()
        lines = lines_of(await client.post("/api/chat", json=body))
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}
    thoughts = "".join(line["message"].get("thinking", "") for line in lines)
    assert thoughts.strip() == whole["message"]["thinking"].strip() == "Hm."
    assert whole["message"]["content"].strip() == ""
    streamed = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert [each["function"] for calls in streamed for each in calls] == [call["function"]]
    assert lines[-1]["done_reason"] == whole["done_reason"] == "stop"


async def test_results_of_tools_get_the_ids_of_their_calls() -> None:
    from quire_server.dialects.ollama.request import ChatRequest

    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("one", "two", "one")]
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "two", "content": "2"},
        {"role": "tool", "tool_name": "one", "content": "1"},
        {"role": "tool", "content": "3"},
    ]
    source: Any = ChatRequest.model_validate({"model": "fake", "messages": messages}).neutral("fake").prompt.source
    turn = source.messages[1]
    ids = [call["id"] for call in turn["tool_calls"]]
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == ['{"a": 1}'] * 3
    assert [each["tool_call_id"] for each in source.messages[2:]] == [ids[1], ids[0], ids[2]]
    assert [each["name"] for each in source.messages[2:]] == ["two", "one", "one"]


async def test_an_answer_can_be_begun() -> None:
    from quire_server.dialects.ollama.request import ChatRequest

    begun = [*HELLO, {"role": "assistant", "content": "Well,"}]
    source: Any = ChatRequest.model_validate({"model": "fake", "messages": begun}).neutral("fake").prompt.source
    assert source.continue_final_message
    assert not source.add_generation_prompt


def test_every_option_of_the_package_is_documented_and_so_treated() -> None:
    from quire_server.dialects.ollama.request import _OFF, ModelOptions

    rows = [line for line in section("docs/ollama.md", "The fields").splitlines() if line.startswith("| `options`: ")]
    taken, unused, off = (set(re.findall(r"`(\w+)`", row.split(" | ")[0])) - {"options"} for row in rows)
    assert taken == set(ModelOptions.model_fields)
    assert off == set(_OFF)
    assert set(ollama.Options.model_fields) <= taken | unused | off
    given = ModelOptions.model_validate(dict.fromkeys(unused, 3))
    assert given.without_effect() == [f"options.{name}" for name in given.model_extra or {}]
    for name in off:
        with pytest.raises(Unsupported):
            ModelOptions.model_validate({name: 3}).without_effect()


async def test_a_form_is_kept() -> None:
    engine = FakeEngine()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with connect(make_app(engine=engine)) as client:
        for form in ("json", schema):
            body = {"model": "fake", "messages": HELLO, "format": form, "options": EIGHT, "stream": False}
            assert (await client.post("/api/chat", json=body)).status_code == 200
            assert engine.submitted[-1].sampling.grammar
        wrong = await client.post("/api/chat", json={"model": "fake", "messages": HELLO, "format": "yaml"})
        assert wrong.status_code == 400


async def test_a_middle_is_filled_in(tmp_path: Any) -> None:
    fake = FakeEngine(replies=lambda request, choice: (*b"middle", 263))
    async with connect(make_app(fim_state(tmp_path, fake))) as client:
        body = {"model": "fake", "prompt": "def f(", "suffix": "): pass", "stream": False}
        reply = (await client.post("/api/generate", json=body)).json()
        assert (reply["response"], reply["done_reason"]) == ("middle", "stop")


async def test_logprobs_of_each_token() -> None:
    async with connect(make_app()) as client:
        body = {"model": "fake", "prompt": "a", "options": EIGHT, "logprobs": True, "top_logprobs": 2, "stream": False}
        reply = (await client.post("/api/generate", json=body)).json()
        assert len(reply["logprobs"]) == 8
        assert all(len(each["top_logprobs"]) == 2 for each in reply["logprobs"])


async def test_vectors() -> None:
    async with connect(make_app()) as client:
        reply = (await client.post("/api/embed", json={"model": "fake", "input": ["a", "b" * 5000]})).json()
        EmbedReply.model_validate(reply)
        assert len(reply["embeddings"]) == 2
        assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in reply["embeddings"])
        openai = (await client.post("/v1/embeddings", json={"model": "fake", "input": "a"})).json()["data"][0][
            "embedding"
        ]
        assert reply["embeddings"][0] == openai
        one = (await client.post("/api/embed", json={"model": "fake", "input": "a"})).json()
        assert one["embeddings"] == [openai]
        assert (await client.post("/api/embeddings", json={"model": "fake", "prompt": "a"})).json() == {
            "embedding": openai
        }
        long = await client.post("/api/embed", json={"model": "fake", "input": "b" * 5000, "truncate": False})
        assert (long.status_code, long.json()["code"]) == (400, "context_length_exceeded")


async def test_no_text_has_no_vector() -> None:
    async with connect(make_app()) as client:
        for fields in ({"input": ""}, {"input": []}, {"input": None}, {}):
            reply = await client.post("/api/embed", json={"model": "fake", **fields})
            assert (reply.status_code, reply.json()) == (200, {"model": "fake", "embeddings": []})
            EmbedReply.model_validate(reply.json())
        reply = await client.post("/api/embeddings", json={"model": "fake", "prompt": ""})
        assert (reply.status_code, reply.json()) == (200, {"embedding": []})
        for wrong in ("", []):
            refused = await client.post("/v1/embeddings", json={"input": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        named = await client.post("/api/embed", json={"model": "other", "input": []})
        assert named.status_code == 404


async def test_the_served_models_are_listed_and_shown() -> None:
    async with connect(make_app()) as client:
        models = (await client.get("/api/tags")).json()["models"]
        assert [each["name"] for each in models] == ["fake", "alias"]
        assert all(len(each["digest"]) == 64 for each in models)
        running = (await client.get("/api/ps")).json()["models"]
        assert running[0]["context_length"] == 512
        for name in ("fake", "fake:latest", "alias"):
            shown = (await client.post("/api/show", json={"model": name})).json()
            assert shown["model_info"]["fake.context_length"] == 512
            assert {"completion", "tools"} <= set(shown["capabilities"])
        assert (await client.get("/api/version")).json()["version"].count(".") == 2
        latest = await client.post("/api/chat", json={"model": "fake:latest", "messages": HELLO, "stream": False})
        assert latest.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("chat", {"model": "no", "messages": HELLO}, 404, "model_not_found"),
        (
            "chat",
            {"model": "fake", "messages": [{"role": "user", "content": "a", "images": ["x"]}]},
            400,
            "unsupported_parameter",
        ),
        ("chat", {"model": "fake", "messages": HELLO, "options": {"temperature": 9}}, 400, "invalid_value"),
        ("chat", {"model": "fake", "messages": HELLO, "options": {"mirostat": 1}}, 400, "unsupported_parameter"),
        ("chat", {"model": "fake", "messages": HELLO, "options": {"num_predict": 0}}, 400, "invalid_value"),
        ("generate", {"model": "fake", "prompt": "a", "template": "x"}, 400, "unsupported_parameter"),
        ("generate", {"model": "fake", "prompt": "a", "context": [1]}, 400, "unsupported_parameter"),
        ("generate", {"model": "fake", "prompt": "a" * 5000}, 400, "context_length_exceeded"),
        ("show", {"model": "no"}, 404, "model_not_found"),
        ("pull", {"model": "llama3"}, 404, "not_found"),
    ],
)
async def test_errors_have_ollamas_envelope(path: str, body: dict[str, Any], status: int, code: str) -> None:
    async with connect(make_app()) as client:
        reply = await client.post(f"/api/{path}", json=body)
        assert reply.status_code == status, reply.text
        assert set(reply.json()) == {"error", "code"}
        assert reply.json()["code"] == code
        assert isinstance(reply.json()["error"], str)


async def test_a_key_is_needed_where_there_is_one_and_a_failure_ends_a_stream() -> None:
    async with connect(make_app(api_key=("key-of-bob",))) as client:
        reply = await client.get("/api/tags")
        assert (reply.status_code, reply.json()["code"]) == (401, "invalid_api_key")
    async with connect(make_app(engine=FakeEngine(fail_after=3))) as client:
        lines = lines_of(await client.post("/api/chat", json={"model": "fake", "messages": HELLO, "options": EIGHT}))
        assert lines[-1]["code"] == "engine_error"
        assert isinstance(lines[-1]["error"], str)


async def test_a_full_queue_refuses_in_ollamas_envelope() -> None:
    engine = FakeEngine()
    engine.hold()
    app = make_app(engine=engine, max_queued_sequences=1)
    app.state.quire.client._num_seats = 1
    async with connect(app) as client:
        import asyncio

        first = asyncio.create_task(
            client.post("/api/generate", json={"model": "fake", "prompt": "a", "stream": False})
        )
        while not engine.submitted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        reply = await client.post("/api/chat", json={"model": "fake", "messages": HELLO})
        assert (reply.status_code, reply.json()["code"]) == (429, "queue_full")
        assert int(reply.headers["retry-after"]) >= 1
        engine.release()
        assert (await first).status_code == 200


@pytest.mark.parametrize(
    ("model", "form", "level"),
    [
        ({"gguf_type": "Q4_K_M", "stored_as": "GGUF, Q4_K, Q6_K"}, "gguf", "Q4_K_M"),
        ({"stored_as": "GPTQ, 4 bits"}, "safetensors", "GPTQ, 4 BITS"),
        ({"dtype": "bfloat16"}, "safetensors", "BFLOAT16"),
    ],
)
async def test_the_format_of_a_model_is_that_of_its_files(model: dict[str, str], form: str, level: str) -> None:
    state = make_state()
    state.client.plan = changed(state.client.plan, model=model)
    async with connect(make_app(state)) as client:
        replies = [
            (await client.get("/api/tags")).json()["models"][0],
            (await client.get("/api/ps")).json()["models"][0],
            (await client.post("/api/show", json={"model": "fake"})).json(),
        ]
    for reply in replies:
        assert (reply["details"]["format"], reply["details"]["quantization_level"]) == (form, level)
