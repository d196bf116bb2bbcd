"""What generation refuses: every field's bad values, limits, and that nothing refused reaches the engine."""

from __future__ import annotations

import json

import pytest

from support.fake_engine import FakeEngine
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio
GREEDY = {"model": "fake", "prompt": "a", "temperature": 0, "max_tokens": 4}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}

FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
WHOLE = ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "priority"]
BOOLEANS = [
    "stream", "echo", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "add_special_tokens", "return_token_ids", "return_tokens_as_token_ids",
    "timings",
]  # fmt: skip

BAD = [
    *[(name, value) for name in FLOATS for value in ("0.5", 1e308, -1e308, True, [], {})],
    *[(name, value) for name in WHOLE for value in ("1", 1.5, True, 2**64, [], {})],
    *[(name, value) for name in BOOLEANS for value in (0, 1, "true", [])],
    *[("temperature", value) for value in (-1e-9, 2.1)],
    *[("top_p", value) for value in (0, -1e-9, 1.1)],
    *[("min_p", value) for value in (-1e-9, 1.1)],
    *[("presence_penalty", value) for value in (-2.1, 2.1)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1)],
    *[("repetition_penalty", value) for value in (0, -1, 11)],
    *[("top_k", value) for value in (-2, 2**31)],
    *[("n", value) for value in (0, -1, 17, 10**9)],
    *[("best_of", value) for value in (0, 17)],
    *[("max_tokens", value) for value in (-2, 2**63)],
    *[("min_tokens", value) for value in (-1, 5, 10**9)],
    *[("seed", value) for value in (2**63, -(2**63) - 1, "a")],
    *[("logprobs", value) for value in (-1, 21, 10**9)],
    *[("prompt_logprobs", value) for value in (-1, 21)],
    *[("stop", value) for value in ("", [""], ["x"] * 17, "x" * 257, 5, [5], {}, [None])],
    *[("stop_token_ids", value) for value in ([-1], [260], [2**31], [2**64], ["a"], [1.0], [True], 5, [1] * 2000)],
    *[("allowed_token_ids", value) for value in ([], [-1], [260], ["1"], [None])],
    *[("bad_words", value) for value in ("a", [""], ["x"] * 129, [5], ["x" * 300])],
    *[("logprob_token_ids", value) for value in ([-1], [260], ["1"], [1.0], 5, [1] * 129)],
    *[("logit_bias", {key: 1}) for key in ("-1", "260", "9" * 20, "1.0", " 1", "a", "01", "", "１")],
    *[("logit_bias", {"1": value}) for value in (101, -101, "1", None, True)],
    ("logit_bias", {str(i): 1 for i in range(2000)}),
    ("logit_bias", [1]),
    *[("cache_salt", value) for value in ("", "x" * 257, "a\x00b", 5, "a\n")],
    *[("request_id", value) for value in ("", "x" * 129, "a b", "é", 5, "a\n")],
    *[("truncate_prompt_tokens", value) for value in (0, -2, "1", 1.5)],
    ("truncation_side", "middle"),
    *[("prompt", value) for value in ("", [], [[]], [""], None, 5, [-1], [260], [2**31], [2**64], [True], [1.5])],
    *[("prompt", value) for value in ([[1], []], [[1], "a"], ["a", 1], [[1, "a"]], ["a"] * 65, [[1]] * 65, {}, [None])],
    *[("model", value) for value in (5, "x" * 300, [])],
    ("stream_options", []),
    ("stream_options", {"include_usage": True}),
]

UNSUPPORTED = {
    "suffix": "x",
    "response_format": {"type": "structural_tag", "format": {}},
    "structured_outputs": {"structural_tag": "{}"},
    "guided_whitespace_pattern": " *",
    "prompt_embeds": "AAAA",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "chat_template": "{{ x }}",
    "logits_processors": ["x"],
    "stop_regex": "a+",
    "thinking_token_budget": 5,
    "repetition_detection": {},
    "mm_processor_kwargs": {"a": 1},
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine_and_client(anyio_backend: str):
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        yield engine, client


async def refuse(engine_and_client, path: str, body: dict) -> dict:
    """The error of a reply that must be a 400 in the envelope, short, and without work for the engine."""
    engine, client = engine_and_client
    submitted = len(engine.submitted)
    raw = json.dumps(body).encode()
    reply = await client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert len(reply.content) <= 2048
    assert len(engine.submitted) == submitted
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("name", dict(BAD))
async def test_bad_values_name_the_field(engine_and_client, name: str) -> None:
    for value in (value for bad, value in BAD if bad == name):
        error = await refuse(engine_and_client, "/v1/completions", GREEDY | {name: value})
        assert error["param"].split("[")[0].split(".")[0] == name, value


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({"5": 1, "-1": 1}, "'-1'"),
        ({"5": 1, "ab\n": 1}, r"'ab\n'"),
        ({"": 1}, "''"),
        ({"x" * 999: 1}, f"'{'x' * 32}'"),
        ({"5": 1, "260": 1}, "260"),
        ({"b": 1, "5": 1, "a": 1, "-2": 1}, "'b', 'a', '-2' are none"),
        ({"260": 1, "5": 1, "300": 1}, "Token ids 260, 300 in"),
        ({"5": 1, "6": 101}, "logit_bias.6"),
    ],
    ids=lambda value: repr(value)[:20],
)
async def test_the_wrong_key_of_logit_bias_is_named(engine_and_client, bias: dict, named: str) -> None:
    error = await refuse(engine_and_client, "/v1/completions", GREEDY | {"logit_bias": bias})
    assert named in error["message"]
    assert "'5'" not in error["message"]


@pytest.mark.parametrize("field", FLOATS)
async def test_no_number_that_json_does_not_have(engine_and_client, field: str) -> None:
    _, client = engine_and_client
    for literal in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = json.dumps(GREEDY | {field: "@"}).replace('"@"', literal)
        reply = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, literal
        assert reply.json()["error"]["code"] == "invalid_json"


IN_CHAT = {"tools", "tool_choice", "thinking_token_budget"}


@pytest.mark.parametrize(
    ("path", "base", "supported"), [("/v1/completions", GREEDY, set()), ("/v1/chat/completions", CHAT, IN_CHAT)]
)
async def test_what_is_not_supported_is_said(engine_and_client, path: str, base: dict, supported: set[str]) -> None:
    for name in UNSUPPORTED.keys() - supported:
        error = await refuse(engine_and_client, path, base | {name: UNSUPPORTED[name]})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ["a"] * 33, "n": 2}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 33, "best_of": 2}, "best_of"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 17, "max_tokens": None}, "min_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [257, 259], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
async def test_combinations_that_cannot_be(engine_and_client, fields: dict, param: str) -> None:
    assert (await refuse(engine_and_client, "/v1/completions", GREEDY | fields))["param"] == param


@pytest.mark.parametrize("model", ["nope", " ", "../../etc/passwd", "a;id"])
@pytest.mark.parametrize(("path", "base"), [("/v1/completions", GREEDY), ("/v1/chat/completions", CHAT)])
async def test_an_unknown_model_is_404(engine_and_client, path: str, base: dict, model: str) -> None:
    _, client = engine_and_client
    reply = await client.post(path, json=base | {"model": model})
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert reply.json()["error"]["param"] == "model"


async def test_a_prompt_beyond_the_context_says_both_numbers(engine_and_client) -> None:
    for size in (512, 5000):
        error = await refuse(engine_and_client, "/v1/completions", GREEDY | {"prompt": "x" * size})
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        assert "512" in error["message"]
        assert str(size) in error["message"]


async def test_a_request_larger_than_the_pool_names_what_fits() -> None:
    engine = FakeEngine()  # its pool has 100 blocks of 16 tokens
    async with connect(make_app(engine=engine, max_model_len=8192)) as client:
        error = await refuse((engine, client), "/v1/completions", GREEDY | {"prompt": "x" * 20, "max_tokens": 2000})
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        largest = int(error["message"].rstrip(".").split()[-1])
        refused = await refuse(
            (engine, client), "/v1/completions", GREEDY | {"prompt": "x" * 20, "max_tokens": largest + 1}
        )
        assert refused["param"] == "max_tokens"
        error = await refuse((engine, client), "/v1/completions", GREEDY | {"prompt": "x" * 1601})
        assert error["param"] == "prompt"
        reply = await client.post("/v1/completions", json=GREEDY | {"prompt": "x" * 20, "max_tokens": largest})
        assert reply.status_code == 200
        chat = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": None, "n": 4, "temperature": 0})
        assert chat.status_code == 200  # a default is lowered to what the pool holds
        assert engine.submitted[-1].stop.max_new_tokens < 1600 / 4


async def test_logprobs_are_bounded_by_the_setting() -> None:
    async with connect(make_app(max_logprobs=2)) as client:
        reply = await client.post("/v1/completions", json=GREEDY | {"logprobs": 3})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "logprobs"


async def test_a_full_queue_is_429() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine, max_queued_sequences=2)) as client:
        reply = await client.post("/v1/completions", json=GREEDY | {"prompt": ["a", "b"], "n": 2})
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert engine.live == ()  # the prompt that had found a place was given up
        streamed = await client.post("/v1/completions", json=GREEDY | {"n": 3, "stream": True})
        assert streamed.status_code == 429


async def test_a_draining_server_takes_nothing_new() -> None:
    state = make_state()
    state.phase.draining = True
    async with connect(make_app(state)) as client:
        reply = await client.post("/v1/completions", json=GREEDY)
        assert reply.status_code == 503
        assert reply.headers["connection"] == "close"
        assert "retry-after" in reply.headers


@pytest.mark.parametrize(("culprit", "header"), [(False, None), (True, "false")])
async def test_an_engine_error_is_500(culprit: bool, header: str | None) -> None:
    engine = FakeEngine(fail_after=2, error="bad step", culprit=culprit)
    async with connect(make_app(engine=engine)) as client:
        reply = await client.post("/v1/completions", json=GREEDY)
    assert reply.status_code == 500
    assert reply.json()["error"] == {
        "message": "bad step", "type": "server_error", "param": None, "code": "engine_error",
    }  # fmt: skip
    assert reply.headers.get("x-should-retry") == header


@pytest.mark.parametrize("error", ["no token is left to choose from", "the grammar does not allow token 5"])
async def test_rules_that_leave_nothing_are_the_requests_own_fault(error: str) -> None:
    """Known only when a token is to be chosen."""
    async with connect(make_app(engine=FakeEngine(fail_after=0, error=error))) as client:
        reply = await client.post("/v1/completions", json=GREEDY)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == f"With what this request asks for, {error}."
