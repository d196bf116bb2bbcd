"""The middle of a text: `suffix` of completions and llama-server's /infill, on a model that can and one that cannot."""

from __future__ import annotations

import json

import pytest

from quire_server.dialects.infill.wire import InfillResponse
from support.fake_engine import FakeEngine
from support.fakes import connect, make_app
from support.fim_tokenizers import fim_state

pytestmark = pytest.mark.anyio

PAD = 263
ANSWER = (*b"middle", PAD)
TEXT = {"input_prefix": "def f(", "input_suffix": "): pass"}
PROMPT = (260, *b"def f(", 261, *b"): pass", 262)


def engine(script=ANSWER) -> FakeEngine:
    return FakeEngine(replies=lambda request, choice: script)


async def post(path, fields, tmp_path, fake=None, status=200):
    async with connect(make_app(fim_state(tmp_path, fake or engine()))) as client:
        reply = await client.post(path, json=fields)
    assert reply.status_code == status, reply.text
    return reply


async def test_a_suffix_makes_the_prompt_and_its_marks_end_the_text(tmp_path):
    fake = engine()
    fields = {"prompt": "def f(", "suffix": "): pass", "max_tokens": 20, "temperature": 0}
    reply = (await post("/v1/completions", fields, tmp_path, fake)).json()
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("middle", "stop")
    (request,) = fake.submitted
    assert request.prompt_token_ids == PROMPT
    assert {260, 261, 262, 263, 264, 265, 257} <= set(request.stop.stop_token_ids)
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)


async def test_several_prompts_and_ids_share_a_suffix(tmp_path):
    fake = engine()
    fields = {"prompt": [[1, 2], [3]], "suffix": "s", "max_tokens": 20}
    await post("/v1/completions", fields, tmp_path, fake)
    assert [request.prompt_token_ids for request in fake.submitted] == [
        (260, 1, 2, 261, ord("s"), 262),
        (260, 3, 261, ord("s"), 262),
    ]


@pytest.mark.parametrize("suffix", [None, ""])
async def test_no_suffix_is_a_plain_completion(tmp_path, suffix):
    fake = engine()
    await post("/v1/completions", {"prompt": "ab", "suffix": suffix, "max_tokens": 3}, tmp_path, fake)
    assert fake.submitted[0].prompt_token_ids == tuple(b"ab")


@pytest.mark.parametrize("name", ["echo", "truncate_prompt_tokens"])
async def test_what_would_cut_or_show_the_prompt_is_refused_beside_it(tmp_path, name):
    fields = {"prompt": "a", "suffix": "b", name: True if name == "echo" else 3}
    reply = await post("/v1/completions", fields, tmp_path, status=400)
    assert reply.json()["error"]["param"] == name


async def test_a_model_that_cannot_says_so():
    async with connect(make_app()) as client:
        error = (await client.post("/v1/completions", json={"prompt": "a", "suffix": "b"})).json()["error"]
        assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
        error = (await client.post("/infill", json=TEXT)).json()["error"]
        assert (error["param"], error["code"]) == ("input_suffix", "unsupported_parameter")


async def test_infill_replies_as_llama_server_does(tmp_path):
    fake = engine()
    reply = await post("/infill", {**TEXT, "prompt": "x", "model": "fake"}, tmp_path, fake)
    InfillResponse.model_validate_json(reply.content, strict=True)
    body = reply.json()
    assert (body["content"], body["stop"], body["stop_type"], body["stopping_word"]) == ("middle", True, "eos", "")
    assert (body["tokens_predicted"], body["tokens_evaluated"]) == (len(ANSWER), len(PROMPT) + 1)
    assert (body["tokens"], body["truncated"], body["model"]) == ([], False, "fake")
    assert body["prompt"] == "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>x"
    (request,) = fake.submitted
    assert request.prompt_token_ids == (*PROMPT, ord("x"))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)


@pytest.mark.parametrize(
    ("fields", "content", "kind", "word"),
    [
        ({"n_predict": 3}, "mid", "limit", ""),
        ({"stop": ["dl"]}, "mid", "word", "dl"),
        ({"n_predict": 0}, "", "limit", ""),
    ],
)
async def test_how_it_ended(tmp_path, fields, content, kind, word):
    body = (await post("/infill", {**TEXT, **fields}, tmp_path)).json()
    assert (body["content"], body["stop_type"], body["stopping_word"]) == (content, kind, word)


async def test_a_stream_is_the_same_text_and_has_no_end_mark(tmp_path):
    reply = await post("/infill", {**TEXT, "stream": True}, tmp_path)
    assert "[DONE]" not in reply.text
    parts = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line]
    assert "".join(part["content"] for part in parts) == "middle"
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [token for part in parts for token in part["tokens"]][:6] == list(b"middle")
    assert (parts[-1]["content"], parts[-1]["stop_type"]) == ("", "eos")


async def test_other_files_and_tokens(tmp_path):
    fake = engine()
    extra = [{"filename": "a.py", "text": "x = 1"}]
    body = (await post("/infill", {**TEXT, "input_extra": extra, "return_tokens": True}, tmp_path, fake)).json()
    assert body["tokens"][:6] == list(b"middle")
    assert b"a.py\nx = 1\n" in bytes(i for i in fake.submitted[0].prompt_token_ids if i < 256)


async def test_what_editors_send_beside_is_reported(tmp_path):
    sent = {"cache_prompt": True, "samplers": ["top_k"], "n_indent": 4, "logit_bias": [], "n_probs": 0}
    reply = await post("/infill", {**TEXT, **sent}, tmp_path)
    assert reply.headers["x-quire-ignored"] == "cache_prompt, samplers, n_indent"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_suffix": "a"}, "input_prefix"),
        ({**TEXT, "n_predict": -2}, "n_predict"),
        ({**TEXT, "logit_bias": [[1, 2]]}, "logit_bias"),
        ({**TEXT, "n_probs": 3}, "n_probs"),
        ({**TEXT, "grammar": "root ::= x"}, "grammar"),
        ({**TEXT, "json_schema": {}}, "json_schema"),
        ({**TEXT, "input_extra": {}}, "input_extra"),
        ({"input_prefix": "a" * 600, "input_suffix": ""}, "input_prefix"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path, fields, param):
    reply = await post("/infill", fields, tmp_path, status=400)
    assert reply.json()["error"]["param"] == param


async def test_timings_are_llama_servers(tmp_path):
    whole = (await post("/infill", {**TEXT, "timings": True}, tmp_path)).json()
    InfillResponse.model_validate(whole, strict=True)
    assert whole["timings"]["predicted_n"] == whole["tokens_predicted"] == len(ANSWER)
    lines = (await post("/infill", {**TEXT, "timings": True, "stream": True}, tmp_path)).text.splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert ["timings" in part for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "timings" not in (await post("/infill", TEXT, tmp_path)).json()
