"""Streams of both endpoints: what each chunk holds, and that joined they are the whole reply."""

from __future__ import annotations

import asyncio
import json
from itertools import accumulate

import pytest

from quire_server.dialects.chat.wire import ChatCompletionChunk
from quire_server.dialects.completions.wire import CompletionChunk
from support.events import choice_texts, finishes, parse_events, stream, text_of, until
from support.fake_engine import REPLY, FakeEngine
from support.fake_tokenizer import EOS
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES = {
    COMPLETION: {"model": "fake", "prompt": "hello", "temperature": 0, "max_tokens": 12},
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 12},
}
both = pytest.mark.parametrize("path", [COMPLETION, CHAT])


async def run(path: str, engine: FakeEngine | None = None, **fields: object) -> list[dict]:
    async with connect(make_app(engine=engine)) as client:
        events = await stream(client, path, BODIES[path] | fields)
    chunk = CompletionChunk if path == COMPLETION else ChatCompletionChunk
    for event in events:
        if "error" not in event:
            chunk.model_validate_json(json.dumps(event), strict=True)
    return events


@both
async def test_every_chunk_names_the_same_reply(path: str) -> None:
    events = await run(path, n=2, stream_options={"include_usage": True})
    assert len({(e["id"], e["created"], e["model"], e["object"], e["system_fingerprint"]) for e in events}) == 1
    assert events[0]["object"] == ("text_completion" if path == COMPLETION else "chat.completion.chunk")


@both
async def test_headers_keep_proxies_from_buffering(path: str) -> None:
    async with connect(make_app()) as client:
        reply = await client.post(path, json=BODIES[path] | {"stream": True, "foo": 1, "max_tokens": 9999})
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-quire-ignored"] == "foo"
    assert reply.headers["x-quire-clamped"].startswith("max_tokens=")
    assert reply.headers["x-request-id"]
    assert "content-length" not in reply.headers


LINE_ENDS = "a\u2028b\u2029c\u0085d\r\ne"


@both
async def test_line_ends_of_unicode_do_not_end_a_line_of_the_stream(path: str) -> None:
    """Clients that split at every line end of Unicode, as Python's `splitlines` does, read whole events."""
    engine = FakeEngine(replies=lambda *_: [*LINE_ENDS.encode(), EOS])
    async with connect(make_app(engine=engine)) as client:
        reply = await client.post(path, json=BODIES[path] | {"stream": True, "max_tokens": 40})
    lines = [line for line in reply.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert "\\u0085" in reply.text
    assert choice_texts([json.loads(line.removeprefix("data: ")) for line in lines[:-1]]) == {0: LINE_ENDS}


async def test_completion_chunks() -> None:
    events = await run(COMPLETION, max_tokens=3)
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": "T", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "h", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "e", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    ]
    assert all("usage" not in event for event in events)


async def test_chat_chunks_begin_with_the_role() -> None:
    events = await run(CHAT, max_tokens=2)
    assert [event["choices"] for event in events] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "T"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "h"}, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    ]


@both
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("🙂é", None, ["", "", "", "🙂", "", "é"]),
        ("say hello", "hell no", ["s", "a", "y", " ", "", "", "", "", "hello"]),
    ],
)
async def test_every_token_has_a_chunk_with_or_without_text(
    path: str, text: str, stop: str | None, shown: list[str]
) -> None:
    """Parts of characters and what may become a stop string are held back; when their tokens came still shows."""
    raw = text.encode()
    events = await run(path, FakeEngine(replies=lambda request, choice: raw), stop=stop, max_tokens=len(raw))
    tokens = events if path == COMPLETION else events[1:]  # the role comes first
    assert [text_of(event) for event in tokens] == shown


@both
async def test_special_tokens_have_chunks_too(path: str) -> None:
    engine = FakeEngine(replies=lambda request, choice: (EOS, EOS, 97))
    events = await run(path, engine, ignore_eos=True, max_tokens=3)
    assert [text_of(event) for event in events][-3:] == ["", "", "a"]


async def test_an_empty_end_has_an_empty_delta() -> None:
    events = await run(CHAT, FakeEngine(replies=lambda request, choice: (97, EOS)))
    assert [e["choices"][0]["delta"] for e in events] == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]
    assert finishes(events) == {0: ("stop", None)}


async def test_each_choice_has_one_role_and_one_finish() -> None:
    engine = FakeEngine(replies=lambda request, choice: (*b"abcdefgh"[choice:], EOS))
    events = await run(CHAT, engine, n=4)
    roles = [c["index"] for e in events for c in e["choices"] if "role" in c["delta"]]
    assert roles == [0, 1, 2, 3]
    assert finishes(events) == dict.fromkeys(range(4), ("stop", None))
    assert choice_texts(events) == {0: "abcdefgh", 1: "bcdefgh", 2: "cdefgh", 3: "defgh"}


async def test_many_prompts_in_one_stream() -> None:
    engine = FakeEngine(replies=lambda request, choice: (request.prompt_token_ids[0], 48 + choice))
    events = await run(
        COMPLETION, engine, prompt=["a", "b", "c"], n=2, max_tokens=4, stream_options={"include_usage": True}
    )
    assert choice_texts(events) == {0: "a0a0", 1: "a1a1", 2: "b0b0", 3: "b1b1", 4: "c0c0", 5: "c1c1"}
    assert set(finishes(events)) == set(range(6))
    assert events[-1]["usage"]["completion_tokens"] == 24
    assert events[-1]["usage"]["prompt_tokens"] == 3


@both
async def test_usage_only_on_request(path: str) -> None:
    events = await run(path, FakeEngine(num_cached_tokens=2), stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all("usage" not in event for event in events[:-1])
    without = await run(path, stream_options={"include_usage": False, "include_obfuscation": False})
    assert all(event["choices"] and "usage" not in event for event in without)


@both
async def test_usage_in_every_chunk_grows(path: str) -> None:
    events = await run(path, n=2, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 24
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    ids = await run(path, n=2, return_token_ids=True)
    so_far = list(accumulate(len(event["choices"][0].get("token_ids", ())) for event in ids))
    assert counts == [*so_far, 24]  # what each chunk says is what it and those before it brought
    assert counts[0] == (1 if path == COMPLETION else 0)


@both
async def test_no_usage_wins_over_usage_in_every_chunk(path: str) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    async with connect(make_app()) as client:
        reply = await client.post(path, json=BODIES[path] | {"stream": True, "stream_options": options})
    assert reply.headers["x-quire-ignored"] == "stream_options.continuous_usage_stats"
    assert all("usage" not in event for event in parse_events(reply.text))
    alone = await run(path, stream_options={"continuous_usage_stats": True})
    assert all("usage" in event and event["choices"] for event in alone)


# -- joined, a stream is the whole reply

TEXT = "naïve 🙂 café — 日本語 text. "
STOPS = [[], ["café"], ["🙂"], ["日本語", "é —"], [" — "], ["t. n", "zzz"], ["e 🙂 c"], ["nope"], ["i", "e"]]


@both
@pytest.mark.parametrize("stops", STOPS, ids=repr)
@pytest.mark.parametrize("include", [False, True])
async def test_joined_chunks_are_the_whole_reply(path: str, stops: list[str], include: bool) -> None:
    raw = TEXT.encode()
    engine = FakeEngine(replies=lambda request, choice: raw[choice:] + raw[:choice])
    fields = {"n": 3, "stop": stops, "include_stop_str_in_output": include, "max_tokens": 50, "seed": 1}
    async with connect(make_app(engine=engine)) as client:
        whole = (await client.post(path, json=BODIES[path] | fields)).json()
        options = {"stream_options": {"include_usage": True}}
        events = await stream(client, path, BODIES[path] | fields | options)
    expected = {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]}
    assert choice_texts(events) == expected
    assert finishes(events) == {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in whole["choices"]}
    assert events[-1]["usage"] == whole["usage"]
    if not include:
        shown = [c for e in events for c in e["choices"]]
        assert not any(stop in text for stop in stops for text in expected.values())
        assert all("�" not in text_of({"choices": [c]}) for c in shown if c["finish_reason"] is None)


@pytest.mark.parametrize("stop", ["quick", "ick br", "T", "The quick brown fox"])
async def test_nothing_of_a_stop_string_is_ever_shown(stop: str) -> None:
    """Tokens are single characters, so the stop string is split at each of its places."""
    events = await run(COMPLETION, stop=stop, max_tokens=40)
    assert choice_texts(events) == {0: REPLY.decode().split(stop)[0]}
    assert finishes(events) == {0: ("stop", stop)}


@both
async def test_joined_logprobs_are_the_whole_ones(path: str) -> None:
    engine = FakeEngine(replies=lambda request, choice: TEXT.encode())
    logprobs = {"logprobs": 2} if path == COMPLETION else {"logprobs": True, "top_logprobs": 2}
    fields = logprobs | {"max_tokens": 30, "return_token_ids": True, "stop": "café"}
    if path == COMPLETION:
        fields["echo"] = True
    async with connect(make_app(engine=engine)) as client:
        whole = (await client.post(path, json=BODIES[path] | fields)).json()["choices"][0]
        events = await stream(client, path, BODIES[path] | fields)
    chunks = [event["choices"][0] for event in events if event["choices"][0]["logprobs"] is not None]
    for key, values in whole["logprobs"].items():
        if values is not None:
            assert [value for chunk in chunks for value in chunk["logprobs"][key]] == values
    ids = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert ids == whole["token_ids"]
    place = events[0]["choices"][0] if path == COMPLETION else events[0]
    assert len(place["prompt_token_ids"]) > 0
    assert sum("prompt_token_ids" in e or "prompt_token_ids" in e["choices"][0] for e in events) == 1
    assert choice_texts(events)[0] == (whole["text"] if path == COMPLETION else whole["message"]["content"])


async def test_echo_comes_with_the_first_chunk() -> None:
    events = await run(COMPLETION, echo=True, max_tokens=2, n=2)
    assert [text_of(event) for event in events] == ["helloT", "helloT", "h", "h"]


async def test_echo_alone_is_one_chunk() -> None:
    events = await run(COMPLETION, echo=True, max_tokens=0, logprobs=0)
    assert [text_of(event) for event in events] == ["hello"]
    assert len(events[0]["choices"][0]["logprobs"]["tokens"]) == 5


async def test_tokens_that_arrive_together_are_one_chunk() -> None:
    engine = FakeEngine()
    engine.hold()
    app = make_app(engine=engine)
    async with connect(app) as client:
        reading = asyncio.create_task(stream(client, COMPLETION, BODIES[COMPLETION]))
        await until(lambda: bool(engine.live))
        [request] = engine.submitted
        outputs = [o for _ in range(12) for o in engine._advance(engine._live[request.request_id])]
        for output in outputs:
            app.state.quire.client._streams[request.request_id].deliver(output)
        engine.release()
        events = await reading
    assert [text_of(event) for event in events] == ["The quick br"]


# -- errors and silence


@both
async def test_an_error_before_the_first_chunk_is_a_status(path: str) -> None:
    async with connect(make_app(engine=FakeEngine(fail_after=0, error="no luck"))) as client:
        reply = await client.post(path, json=BODIES[path] | {"stream": True})
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "no luck"


@both
async def test_a_later_error_is_an_event_and_then_the_end(path: str) -> None:
    engine = FakeEngine(fail_after=3, error="no luck")
    events = await run(path, engine, n=2)
    assert events[-1] == {
        "error": {"message": "no luck", "type": "server_error", "param": None, "code": "engine_error"}
    }
    assert choice_texts(events[:-1]) == {0: "The", 1: "The"}
    assert finishes(events[:-1]) == {}
    assert engine.live == ()


@both
async def test_silence_is_filled_with_comments(path: str) -> None:
    engine = FakeEngine()
    engine.hold()
    async with connect(make_app(engine=engine, sse_keep_alive_interval=0.05)) as client:
        asyncio.get_running_loop().call_later(0.5, engine.release)
        reply = await client.post(path, json=BODIES[path] | {"stream": True})
    assert reply.text.startswith(": keep-alive\n\n")
    assert choice_texts(parse_events(reply.text)) == {0: "The quick br"}


async def test_an_error_after_a_comment_is_an_event() -> None:
    engine = FakeEngine(fail_after=0, error="no luck")
    engine.hold()
    async with connect(make_app(engine=engine, sse_keep_alive_interval=0.03)) as client:
        asyncio.get_running_loop().call_later(0.3, engine.release)
        reply = await client.post(COMPLETION, json=BODIES[COMPLETION] | {"stream": True})
    assert reply.status_code == 200
    assert parse_events(reply.text) == [
        {"error": {"message": "no luck", "type": "server_error", "param": None, "code": "engine_error"}}
    ]
