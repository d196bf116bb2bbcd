"""`quire trace` against a listening server: its story names rules, its lines are the log, what is wrong is one line."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire_engine.contract.types import PREEMPTION_CAUSES
from quire_engine.engine import Engine
from quire_engine.process.loop import inspected
from quire_engine.process.transport import Inspect
from quire_lab.commands import trace
from support.fake_executor import Run, new_run, request
from support.fakes import listening, make_app, make_state

pytestmark = pytest.mark.anyio


def served(run: Run, **settings: object) -> Any:
    """An app whose questions go to the run's scheduler."""
    engine = Engine(run.scheduler, run.executor)

    async def inspect(what: str, argument: str) -> bytes:
        return inspected(engine, Inspect(token=1, what=what, argument=argument)).body

    state = make_state(**settings)
    state.engines.inspect = inspect
    return make_app(state)


async def traced(app: Any, *argv: str) -> int:
    async with listening(app) as server:
        return await asyncio.to_thread(trace.run, ["--url", f"http://127.0.0.1:{server.port}", *argv])


async def test_the_story_names_what_happened_and_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(num_blocks=8, block_size=4, max_num_batched_tokens=64, max_num_seqs=2, min_chunk=4)
    run.add(request("old-request", 12, 12), request("young", 12, 12), request("third", 8, 2))
    run.to_end()
    assert await traced(served(run)) == 0
    story = capsys.readouterr().out
    first = story.split("\nstep 2 ")[0].splitlines()
    assert first[0].startswith("step 1  +0.000 s  1000.0 ms  24 prompt + 0 decode tokens  running 2  waiting 1")
    assert first[1:] == [
        "  elder      old-requ is served first until it ends: overdue, or the longest here  [elder rule]",
        "  enters     old-requ: a slot, blocks and tokens are there  [admission]",
        "  enters     young: a slot, blocks and tokens are there  [admission]",
        "  waits      third: as many sequences run as may  [--max-num-seqs]",
        "  computes   old-requ tokens 0 to 11  [chunk]",
        "  computes   young tokens 0 to 11  [chunk]",
    ]
    assert "  preempted  young: the elder needs blocks or a slot, for old-requ  [elder rule]" in story
    assert "  waits      young: its prompt needs more free blocks than there are, held by old-requ (17 tokens)" in story
    assert "  decodes    2 sequences, a token each  [no stall]" in story
    assert "  ends       old-requ after 12 tokens  [length]" in story
    numbers = [line.split()[1] for line in story.splitlines() if line.startswith("step ")]
    assert numbers == [str(step + 1) for step in range(len(run.log))]


async def test_many_pages_are_one_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "PAGE", 7)
    run = new_run()
    run.add(request("a", 20, 40))
    run.to_end()
    assert await traced(served(run), "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines[:3]] == ["config", "submit", "step"]
    assert [line["step_id"] for line in lines if line["kind"] == "step"] == list(range(1, 41))
    ordinals = [line["ordinal"] for line in lines[1:]]
    assert ordinals == sorted(set(ordinals))


async def test_a_gap_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(step_log=4)
    run.add(request("a", 20, 10))
    run.to_end()
    assert await traced(served(run)) == 0
    assert capsys.readouterr().out.startswith("... 6 steps are not remembered any more ...\nstep 7 ")


async def test_it_brings_the_admin_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    run.add(request("a", 20, 2))
    run.to_end()
    app = served(run, admin_api_key=("sesame-123",))
    assert await traced(app) == 1
    assert "Missing or invalid" in capsys.readouterr().err
    assert await traced(app, "--admin-api-key", "sesame-123") == 0
    assert capsys.readouterr().out.count("step 1 ") == 1
    without = served(run, api_key=("ordinary",))
    assert await traced(without) == 1
    said = capsys.readouterr().err
    assert "start it with --admin-api-key KEY" in said
    assert "Give this command the server's admin key: --admin-api-key KEY or QUIRE_ADMIN_API_KEY" in said
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "sesame-123")
    assert await traced(app) == 0
    assert capsys.readouterr().out.count("step 1 ") == 1


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace.run(["--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    monkeypatch.setattr(trace, "listening", lambda: {"http://127.0.0.1:1", "http://127.0.0.1:2"})
    assert trace.run([]) == 2
    assert "several servers" in capsys.readouterr().err


class Growing:
    """A log that a restart makes begin anew, with a step that is not computed yet."""

    def __init__(self, *logs: list[dict[str, Any]]) -> None:
        self._logs = list(logs)

    def page(self, after: int, *, events: bool) -> dict[str, Any]:
        assert not events
        steps = self._logs.pop(0)
        return {"steps": [s for s in steps if s["step_id"] > after], "first": 1, "last": len(steps)}


def step(step_id: int, applied_at: float | None = 1.0) -> dict[str, Any]:
    return {"step_id": step_id, "applied_at": applied_at, "slices": [["a", 0, 0, 1]]}


def test_it_follows_steps_in_flight_and_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "POLL_SECONDS", 0.0)
    begun = [step(1), step(2), step(3, None)]
    log = Growing(begun, begun, [step(i) for i in range(1, 5)], [step(1)], [step(1)])
    followed = trace.pages(log, 0, events=False, follow=True)
    told = [next(followed) for _ in range(3)]
    assert [[s["step_id"] for s in page["steps"]] for page in told] == [[1, 2], [3, 4], [1]]
    assert [page["restarted"] for page in told] == [False, False, True]


@pytest.mark.parametrize("cause", PREEMPTION_CAUSES)
def test_every_cause_of_a_preemption_has_words_and_a_rule(cause: str) -> None:
    why, rule = trace._PREEMPTIONS[cause]
    assert why
    assert rule


def test_a_decision_of_a_kind_that_is_new_is_told_as_it_is() -> None:
    decision = {"kind": "joins", "request_id": "abcdefghij", "reason": "prefix", "num_tokens": 3}
    new = {**step(1), "seconds": 0.5, "planned_at": 2.0, "prefill_tokens": 1, "decode_tokens": 0, "running": 1}
    new |= {"waiting": 0, "blocks_used": 1, "copies": [], "decisions": [decision], "starved": ["x"], "ends": []}
    lines = list(trace.narrate(new, since=1.0))
    assert lines[1] == "  joins      abcdefgh: prefix  [joins]"
    assert lines[0].startswith("step 1  +1.000 s  500.0 ms")
