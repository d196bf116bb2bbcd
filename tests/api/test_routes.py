"""Models, tokens, health, version and metrics: what the routes other than generation answer."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from support.fake_tokenizer import BOS, EOS, IM_END, IM_START, VOCAB_SIZE
from support.fakes import MODEL, connect, exchange, listening, make_app, make_state, parse_reply

pytestmark = pytest.mark.anyio

GONE = b"GET /gone HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def test_models_are_listed_in_order() -> None:
    state = make_state(max_model_len=300, model_names=("org/first", "second"))
    async with connect(make_app(state)) as client:
        reply = (await client.get("/v1/models")).json()
        assert reply["object"] == "list"
        assert [model["id"] for model in reply["data"]] == ["org/first", "second"]
        first = reply["data"][0]
        assert (first["object"], first["owned_by"], first["max_model_len"]) == ("model", "quire", 300)
        assert abs(first["created"] - time.time()) < 60
        assert (await client.get("/v1/models/org/first")).json() == first
        assert (await client.get("/v1/models/second")).json()["root"] == "org/first"


async def test_what_the_model_was_given_as_is_taken_and_not_listed() -> None:
    state = make_state(model_names=("tiny",))
    state.other_names = ("/models/tiny",)
    async with connect(make_app(state)) as client:
        (listed,) = (await client.get("/v1/models")).json()["data"]
        assert (listed["id"], listed["root"]) == ("tiny", "tiny")
        assert [each["name"] for each in (await client.get("/api/tags")).json()["models"]] == ["tiny"]
        same = {"id": "/models/tiny", "display_name": "/models/tiny"}
        assert (await client.get("/v1/models//models/tiny")).json() == listed | same
        body = {"model": "/models/tiny", "max_tokens": 1}
        chat = body | {"messages": [{"role": "user", "content": "a"}]}
        for path, asked in (
            ("/v1/completions", body | {"prompt": "a"}),
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"model": "/models/tiny", "input": "a"}),
            ("/tokenize", {"model": "/models/tiny", "prompt": "a"}),
        ):
            reply = await client.post(path, json=asked)
            assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("name", ["gpt-5", "../../etc/passwd", "a;id", "%2e%2e%2fx", "m" * 5000, "First"])
async def test_an_unknown_model_is_404(name: str) -> None:
    async with connect(make_app(model_names=("first",))) as client:
        reply = await client.get(f"/v1/models/{name}")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] in {"model_not_found", "not_found"}
    assert len(reply.content) < 1000


async def test_the_error_for_an_unknown_model_lists_those_that_there_are() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "model": "gpt-4o"}
    for names, known in (
        (("first",), "This server has 'first'."),
        (tuple("abcdefgh"), "This server has 'a', 'b', 'c', 'd', 'e', 'f' and 2 more, see /v1/models."),
    ):
        async with connect(make_app(model_names=names)) as client:
            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
                reply = await client.post(path, json=body | {"max_tokens": 1})
                assert reply.status_code == 404
                error = reply.json()["error"]
                assert (error if isinstance(error, str) else error["message"]) == (
                    f"The model 'gpt-4o' does not exist. {known}"
                )
            assert known in (await client.get("/v1/models/gpt-4o")).json()["error"]["message"]


async def test_tokenize_a_prompt() -> None:
    async with connect(make_app(max_model_len=300)) as client:
        reply = await client.post("/tokenize", json={"prompt": "hé<|end|>", "model": "alias", "unknown": 1})
        assert reply.json() == {
            "count": 4,
            "max_model_len": 300,
            "tokens": [104, 195, 169, EOS],
            "token_strs": None,
        }
        with_strings = await client.post("/tokenize", json={"prompt": "h é<|end|>", "return_token_strs": True})
        assert with_strings.json()["token_strs"] == ["h", "Ġ", "Ã", "©", "<|end|>"]


async def test_tokenize_messages() -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with connect(make_app()) as client:
        tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
        assert tokens == [IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n"]
        bare = await client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})
        assert bare.json()["tokens"] == [IM_START, *b"user\nhi", IM_END, *b"\n"]
        assert "x-quire-notes" not in bare.headers
        noted = await client.post("/tokenize", json={"messages": messages, "chat_template_kwargs": {"x": 1}})
        assert noted.json()["tokens"] == tokens
        assert noted.headers["x-quire-notes"] == "the chat template does not name the variable x"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, None),
        ({"prompt": 1}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "a"}], "continue_final_message": True}, None),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": 1}},
            "chat_template_kwargs",
        ),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ],
)
async def test_tokenize_refuses(body: dict[str, object], param: str | None) -> None:
    async with connect(make_app()) as client:
        reply = await client.post("/tokenize", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_tokenize_without_a_chat_template() -> None:
    async with connect(make_app(template=None)) as client:
        reply = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")


async def test_detokenize() -> None:
    async with connect(make_app()) as client:
        reply = await client.post("/detokenize", json={"tokens": [104, 195, 169, BOS]})
        assert reply.json() == {"prompt": "hé<|bos|>"}
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31, 2**64, True, 1.5, "a", None])
async def test_detokenize_refuses(token: object) -> None:
    async with connect(make_app()) as client:
        reply = await client.post("/detokenize", json={"tokens": [104, token]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tokens[1]"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_token_routes_know_their_model(path: str) -> None:
    body = {"model": "gpt-5", "prompt": "a", "tokens": [1]}
    async with connect(make_app()) as client:
        reply = await client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_long_texts_are_encoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    threads: list[int] = []
    encode = state.model_text.tokenizer.encode

    def recorded(text: str, *, add_special_tokens: bool) -> list[int]:
        threads.append(threading.get_ident())
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(state.model_text.tokenizer, "encode", recorded)
    async with connect(make_app(state)) as client:
        for text in ("short", "long " * 10_000):
            reply = (await client.post("/tokenize", json={"prompt": text})).json()
            assert reply["tokens"] == list(text.encode())
            back = await client.post("/detokenize", json={"tokens": reply["tokens"]})
            assert back.json()["prompt"] == text
    assert threads[0] == threading.get_ident()
    assert threads[1] != threading.get_ident()


async def test_tokenizer_info() -> None:
    async with connect(make_app()) as client:
        info = (await client.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"]) == ("<|bos|>", "<|end|>")
    assert "add_generation_prompt" in info["chat_template"]


async def test_version() -> None:
    from importlib.metadata import version

    async with connect(make_app()) as client:
        assert (await client.get("/version")).json() == {"version": version("quire")}


async def test_metrics_are_prometheus_text() -> None:
    async with connect(make_app()) as client:
        await client.get("/v1/models")
        reply = await client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert "# TYPE quire_requests_running gauge" in reply.text
    replies = f'quire_http_requests_total{{handler="/v1/models",method="GET",model_name="{MODEL}",status="200"}} 1.0'
    assert replies in reply.text


async def test_ready_while_serving() -> None:
    async with connect(make_app()) as client:
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200, path


@pytest.mark.parametrize("reason", ["engine restarting", "engine stopped", "engine dead"])
async def test_not_ready_while_the_engine_is_in_trouble(reason: str) -> None:
    state = make_state()
    trouble: str | None = reason
    state.engines.trouble = lambda: trouble
    async with connect(make_app(state)) as client:
        for path in ("/health", "/health/ready"):
            reply = await client.get(path)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == reason.replace(" ", "_")
            assert reason in reply.json()["error"]["message"]
            assert 1 <= int(reply.headers["retry-after"]) <= 30
        assert (await client.get("/health/live")).status_code == 200
        trouble = None
        assert (await client.get("/health/ready")).status_code == 200


async def test_not_ready_while_draining() -> None:
    state = make_state()
    state.phase.draining = True
    async with connect(make_app(state)) as client:
        reply = await client.get("/health/ready")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
        assert reply.headers["connection"] == "close"
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


async def test_event_loop_stalls_are_measured() -> None:
    app = make_app()
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0.15)
        time.sleep(0.4)  # noqa: ASYNC251 - the stall itself
        await asyncio.sleep(0.2)
    text = app.state.quire.metrics.render().decode()
    late = [line for line in text.splitlines() if line.startswith("quire_event_loop_stall_seconds_sum")]
    assert float(late[0].split(" ")[1]) > 0.25


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/api/tags", "/api/version", "/openapi.json"])
async def test_head_is_get_without_the_body(path: str) -> None:
    request = b"%b " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: one\r\n\r\n"
    async with listening(make_app()) as server:
        head = parse_reply(await exchange(server.port, request % b"HEAD"))
        whole = parse_reply(await exchange(server.port, request % b"GET"))
    assert (head.status_code, head.content) == (200, b"")
    assert {**head.headers, "date": ""} == {**whole.headers, "date": ""}
    assert int(head.headers["content-length"]) == len(whole.content)


async def test_head_of_a_stream_ends_with_its_head() -> None:
    app = make_app()
    async with listening(app) as server:
        raw = await exchange(server.port, b"HEAD /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2 + GONE)
        assert [part.split(b" ")[1] for part in raw.split(b"HTTP/1.1")[1:]] == [b"200", b"200", b"404"]
    metrics = app.state.quire.metrics.render().decode()
    name = f'quire_http_requests_total{{handler="/dashboard/events",method="HEAD",model_name="{MODEL}",status="200"}}'
    assert f"{name} 2.0" in metrics


async def test_head_where_get_is_not() -> None:
    async with connect(make_app(api_key=("key",))) as client:
        keyed = {"authorization": "Bearer key"}
        reply = await client.head("/detokenize", headers=keyed)
        assert (reply.status_code, reply.headers["allow"], reply.content) == (405, "POST", b"")
        assert (await client.delete("/v1/models", headers=keyed)).headers["allow"] == "GET, HEAD"
        assert (await client.head("/v1/models")).status_code == 401
