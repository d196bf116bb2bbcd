"""llama-server's `timings`: in replies that ask for them, once, with counts that agree with the usage."""

from __future__ import annotations

import pytest

from quire_server.answering.rendering import timings_of
from quire_server.dialects.chat.wire import ChatCompletionChunk, ChatCompletionResponse
from quire_server.dialects.common import Timings
from quire_server.dialects.completions.wire import CompletionChunk, CompletionResponse
from quire_server.metrics.request_record import RequestSummary
from support.events import parse_events
from support.fake_engine import FakeEngine
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio

BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 6},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6},
}


def summary(**fields: object) -> RequestSummary:
    known: dict[str, object] = {
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 5,
        "max_tokens": 5,
        "n": 1,
        "outcome": "length",
        "started": 1.0,
        "first": 2.0,
        "last": 4.0,
        "ended": 4.5,
        "queue_seconds": 0.25,
        "prefill_seconds": 0.75,
        "token_seconds": 2.0,
        "following_tokens": 4,
    }
    return RequestSummary(**(known | fields))


def test_counts_are_of_all_prompts_and_times_of_the_longest() -> None:
    told = timings_of([summary(), summary(first=3.0, last=3.5, queue_seconds=0.5, cached_tokens=0)])
    assert told == {
        "cache_n": 4,
        "prompt_n": 16,
        "prompt_ms": 750.0,
        "prompt_per_token_ms": 46.875,
        "prompt_per_second": 21.333,
        "predicted_n": 10,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 200.0,
        "predicted_per_second": 5.0,
        "queue_ms": 500.0,
    }
    nothing = timings_of([summary(output_tokens=0, first=None, last=None, prefill_seconds=None, cached_tokens=10)])
    assert (nothing["prompt_n"], nothing["prompt_per_second"], nothing["predicted_per_second"]) == (0, None, None)
    Timings.model_validate(nothing)


@pytest.mark.parametrize("path", BODIES)
async def test_a_reply_has_them_when_asked(path: str) -> None:
    app = make_app(engine=FakeEngine(step_seconds=0.002, num_cached_tokens=2))
    async with connect(app) as client:
        plain = (await client.post(path, json=BODIES[path])).json()
        assert "timings" not in plain
        whole = (await client.post(path, json=BODIES[path] | {"timings": True, "n": 2, "temperature": 1})).json()
        shape = CompletionResponse if path == "/v1/completions" else ChatCompletionResponse
        shape.model_validate(whole, strict=True)
    told, usage = whole["timings"], whole["usage"]
    assert told["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert told["prompt_n"] + told["cache_n"] == usage["prompt_tokens"]
    assert told["predicted_n"] == usage["completion_tokens"] == 12
    assert told["predicted_ms"] > 0
    assert told["predicted_per_second"] == pytest.approx(12e3 / told["predicted_ms"], rel=0.01)


@pytest.mark.parametrize("usage", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_has_them_in_its_last_chunk(path: str, usage: dict[str, bool] | None) -> None:
    body = BODIES[path] | {"stream": True, "stream_options": usage, "timings": True, "n": 2, "temperature": 1}
    async with connect(make_app(engine=FakeEngine(step_seconds=0.002))) as client:
        chunks = parse_events((await client.post(path, json=body)).text)
        untold = parse_events((await client.post(path, json=body | {"timings": False})).text)
    assert not any("timings" in chunk for chunk in untold)
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["timings"]["predicted_n"] == 12
    assert bool(chunks[-1]["choices"]) is (usage != {"include_usage": True})
    shape = CompletionChunk if path == "/v1/completions" else ChatCompletionChunk
    shape.model_validate(chunks[-1], strict=True)
