"""`return_progress`: how far a long prompt is, in chunks of the stream, from the engine's steps to the client."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from quire_engine.contract.types import EngineStats, PromptProgress, StepOutput, TokenOutput
from support.fake_engine import FakeEngine
from support.fake_executor import new_run, request
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio

ASKS = {
    "/v1/completions": {"prompt": "abcdefgh"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abcdefgh"}]},
}


def chunks_of(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def tell(engine: FakeEngine, request_id: str, computed: int, seconds: float, cached: int = 0) -> None:
    progress = PromptProgress(num_computed=computed, seconds=seconds)
    output = TokenOutput(request_id=request_id, num_cached_tokens=cached, progress=progress)
    engine.on_step(StepOutput(step_id=0, outputs=(output,), stats=EngineStats()))


async def submitted(engine: FakeEngine) -> str:
    async with asyncio.timeout(300):
        while not engine.submitted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return engine.submitted[0].request_id


@pytest.mark.parametrize("path", ASKS)
async def test_chunks_before_the_first_token_tell_it(path: str) -> None:
    engine = FakeEngine()
    engine.hold()
    async with connect(make_app(engine=engine)) as client:
        body = ASKS[path] | {"max_tokens": 3, "temperature": 0, "stream": True, "return_progress": True}
        asking = asyncio.create_task(client.post(path, json=body))
        name = await submitted(engine)
        for computed, seconds, cached in ((3, 0.25, 2), (5, 0.5, 2), (4, 0.75, 2)):  # the last: preempted, and again
            tell(engine, name, computed, seconds, cached)
        engine.release()
        reply = await asking
        plain = await client.post(path, json=ASKS[path] | {"max_tokens": 3, "temperature": 0, "stream": True})
    total = len(engine.submitted[0].prompt_token_ids)
    chunks = chunks_of(reply)
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert [(each["total"], each["cache"], each["processed"]) for each in told] == [
        (total, 2, 3),
        (total, 2, 5),
        (total, 2, total),
    ]
    assert [each["time_ms"] for each in told[:2]] == [250, 500]
    assert all("prompt_progress" in chunk for chunk in chunks[:3])
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:3])
    without = [chunk["choices"] for chunk in chunks if "prompt_progress" not in chunk]
    assert without == [chunk["choices"] for chunk in chunks_of(plain)]
    assert [each.tells_progress for each in engine.submitted] == [True, False]


@pytest.mark.parametrize("path", ASKS)
async def test_a_whole_reply_has_none_and_says_so(path: str) -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        reply = await client.post(path, json=ASKS[path] | {"max_tokens": 1, "return_progress": True})
    assert reply.headers["x-quire-ignored"] == "return_progress"
    assert "prompt_progress" not in reply.json()
    assert not engine.submitted[0].tells_progress


def test_the_engine_tells_each_part_but_the_last_to_those_who_ask() -> None:
    run = new_run(max_num_seqs=8, max_num_batched_tokens=32)
    asks, silent = replace(request("a", 100, 2), tells_progress=True, n=2), request("b", 100, 2)
    run.add(asks, silent)
    run.to_end()
    by_name = {name: [each for each in run.outputs if each.request_id == name] for name in "ab"}
    told = [each.progress for each in by_name["a"] if each.progress is not None]
    counts = [each.num_computed for each in told]
    assert len(counts) > 1
    assert counts == sorted(set(counts))
    assert counts[-1] < 100
    assert [each.seconds for each in told] == sorted(each.seconds for each in told)
    assert all(not each.token_ids and each.finish is None for each in by_name["a"] if each.progress is not None)
    assert all(each.progress is None for each in by_name["b"])
    assert [each.choice for each in by_name["a"] if each.finish is not None] == [0, 1]
