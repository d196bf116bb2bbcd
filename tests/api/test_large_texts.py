"""Long texts and large replies through the routes: the same as short ones, bounded, and gone with their client."""

from __future__ import annotations

import asyncio
import json
from typing import NoReturn

import pytest

from quire_server.answering import echoing
from quire_server.text.text_threads import LARGE_CHARS
from quire_server.text.tokenizer import TextTokenizer
from quire_server.text.tokenizer_process import TokenizerProcess
from support.events import parse_events
from support.fake_engine import FakeEngine
from support.fakes import connect, listening, make_app, make_state

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
LONG = {
    "prompt": [*b"a tale<|end|> of 7 \xc3\xa9\xf0\x9f\x98\x80 words. "] * 20,
    "max_tokens": 3,
    "echo": True,
    "logprobs": 2,
}


def joined(events: list[dict], index: int) -> dict[str, list]:
    """One choice of a stream, put together."""
    whole: dict[str, list] = {"text": [], "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                whole["text"].append(choice["text"])
                for name, values in (choice["logprobs"] or {}).items():
                    whole[name] += values
    return whole


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_long_echo_comes_in_parts_that_are_the_whole(max_tokens: int) -> None:
    body = LONG | {"max_tokens": max_tokens, "n": 2, "seed": 5, "return_token_ids": True}
    async with connect(make_app(max_model_len=4096)) as client:
        whole = (await client.post(COMPLETIONS, json=body)).json()
        events = parse_events((await client.post(COMPLETIONS, json=body | {"stream": True})).text)
    prompt_ids = [
        choice["prompt_token_ids"] for event in events for choice in event["choices"] if "prompt_token_ids" in choice
    ]
    assert prompt_ids == [LONG["prompt"]] * 2, "once for each choice"
    for choice in whole["choices"]:
        parts = joined(events, choice["index"])
        assert "".join(parts.pop("text")) == choice["text"]
        assert parts == choice["logprobs"]
    frames = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    assert len(frames) >= len(LONG["prompt"]) // echoing.TOKENS_AT_ONCE
    assert max(len(frame["logprobs"]["tokens"]) for frame in frames) <= echoing.TOKENS_AT_ONCE
    ids = [token for frame in frames for token in frame["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]


async def test_a_short_echo_comes_at_once() -> None:
    async with connect(make_app()) as client:
        reply = await client.post(COMPLETIONS, json=LONG | {"prompt": "a tale", "stream": True})
    first = parse_events(reply.text)[0]["choices"][0]
    assert first["text"].startswith("a tale")
    assert len(first["logprobs"]["tokens"]) == 7


async def test_a_large_reply_has_no_length_and_is_whole() -> None:
    state = make_state(max_model_len=4096)
    body = {"prompt": [[65] * 900, [66] * 900], "max_tokens": 2, "prompt_logprobs": 20, "logprobs": 1, "n": 2}
    async with connect(make_app(state)) as client:
        reply = await client.post(COMPLETIONS, json=body)
        small = await client.post(COMPLETIONS, json=body | {"prompt": "a"})
    assert "content-length" not in reply.headers
    assert int(small.headers["content-length"]) == len(small.content)
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice in choices:
        scores = choice["prompt_logprobs"]
        assert len(scores) == 900
        assert scores[0] is None
        assert all(str(65 + choice["index"] // 2) in each for each in scores[1:])
    assert state.replies.num_bytes == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x" * 100_000}),
        (COMPLETIONS, {"prompt": [65] * 513}),
        (COMPLETIONS, {"prompt": ["a", "x" * 100_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("/v1/embeddings", {"input": "x" * 100_000}),
        ("/v1/embeddings", {"input": [65] * 513}),
    ],
)
async def test_what_cannot_fit_is_not_tokenized(path: str, body: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(_self: TextTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        assert len(text) < 5000
        return [65]

    app = make_app(pooling="last")
    monkeypatch.setattr(TextTokenizer, "encode", encode)
    async with connect(app) as client:
        reply = await client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_prompt_that_is_cut_may_be_longer() -> None:
    async with connect(make_app()) as client:
        for prompt in ("x" * 100_000, [65] * 200_000):
            body = {"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": 7}
            assert (await client.post(COMPLETIONS, json=body)).json()["usage"]["prompt_tokens"] == 7
        wrong = {
            "prompt": [65] * 150_000 + [999_999],
            "max_tokens": 1,
            "truncate_prompt_tokens": 7,
            "truncation_side": "right",
        }
        assert (await client.post(COMPLETIONS, json=wrong)).status_code == 400


async def test_text_beyond_the_bound_is_refused_at_once() -> None:
    state = make_state(max_text_bytes_queued=100_000)
    async with connect(make_app(state)) as client:
        with state.text._budget.hold(99_000):
            short = await client.post("/tokenize", json={"prompt": "a" * 100})
            refused = await client.post("/tokenize", json={"prompt": "a" * 5000})
        metrics = (await client.get("/metrics")).text
        assert (await client.post("/tokenize", json={"prompt": "a" * 5000})).json()["count"] == 5000
    assert short.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "text_queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert 'quire_rejected_total{model_name="fake",reason="max_text_bytes_queued"} 1.0' in metrics
    assert 'quire_text_work_bytes{model_name="fake"} 0.0' in metrics


async def test_replies_beyond_the_bound_are_refused_before_they_run() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, max_model_len=4096, max_reply_bytes_waiting=1 << 20)
    other = state.replies.hold()
    other.grow(1 << 20)
    body = {"prompt": [65] * 1000, "max_tokens": 1, "prompt_logprobs": 20}
    async with connect(make_app(state)) as client:
        refused = await client.post(COMPLETIONS, json=body)
        assert not engine.submitted
        assert (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})).status_code == 200
        other.release()
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "replies_full")
    assert state.replies.num_bytes == 0


async def test_very_long_texts_become_ids_and_text_again() -> None:
    text = 'é"\n😀 <|end|>' * (LARGE_CHARS // 8)
    async with connect(make_app(max_body_bytes=64 << 20)) as client:
        body = {"prompt": text, "return_token_strs": True}
        reply = (await client.post("/tokenize", json=body)).json()
        assert len(reply["tokens"]) == len(reply["token_strs"]) == reply["count"] > LARGE_CHARS
        back = await client.post("/detokenize", json={"tokens": reply["tokens"]})
        assert back.json() == {"prompt": text}
        wrong = await client.post("/detokenize", json={"tokens": [*reply["tokens"], 70_000]})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == f"tokens[{reply['count']}]"


MANY = [{"type": "text", "text": "x"}] * 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": MANY}] * 9}),
        ("/tokenize", {"messages": [{"role": "user", "content": MANY}] * 9}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": MANY}] * 9}),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": MANY}] * 9}
                ],
            },
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 1000}] * 9},
        ),
    ],
)
async def test_the_parts_of_all_messages_are_bounded(path: str, body: dict) -> None:
    async with connect(make_app()) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 400
    assert "at most 8192 content parts" in reply.text


async def test_text_work_ends_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_ends(*_: object, **__: object) -> NoReturn:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    began = asyncio.Event()
    monkeypatch.setattr(TokenizerProcess, "encode", never_ends)
    state = make_state(max_body_bytes=16 << 20)
    body = json.dumps({"prompt": "ab" * (3 << 20)}).encode()
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    async with listening(make_app(state)) as server:
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head.encode() + body)
            await writer.drain()
            writers.append(writer)
        async with asyncio.timeout(300):
            while state.text._budget.num_texts < 4:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
            await began.wait()
        for writer in writers:
            writer.transport.abort()
        async with asyncio.timeout(300):
            while state.text._budget.num_texts:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
