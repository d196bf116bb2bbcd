"""Questions to the engine over its socket: answered between steps, and in words where they cannot be."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from quire_engine.contract.errors import EngineDead, QuireError, Unanswerable
from quire_engine.engine import Engine
from quire_engine.process import loop
from quire_engine.process.loop import inspected
from quire_engine.process.transport import Inspect
from quire_server.engine import connection, supervisor
from support.fake_executor import new_run, request
from support.supervising import request as wanted
from support.supervising import run, supervised


def engine() -> Engine:
    made = new_run()
    return Engine(made.scheduler, made.executor)


def test_a_running_engine_answers_while_it_streams() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            supervisor.submit(wanted("r", tokens=60))
            await client.until(lambda: bool(client.tokens))
            answer = json.loads(await supervisor.inspect("steps", '{"limit":1}'))
            assert answer["first"] == 1 <= answer["last"]
            (step,) = answer["steps"]
            assert step["slices"] == [["r", 0, 0, 3]]
            (told,) = json.loads(await supervisor.inspect("request", '{"ids":["r"]}'))["requests"]
            assert told["state"] == "decode"
            with pytest.raises(Unanswerable, match="no such request"):
                await supervisor.inspect("request", '{"ids":["x"]}')
            await client.until(lambda: ("r", 0) in client.ends)

    run(body)


def test_answers_go_to_whom_they_are_for() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, _):
            asked = [supervisor.inspect(what) for what in ("audit", "kv", "steps", "kv", "requests")]
            audit, kv, steps, again, requests = map(json.loads, await asyncio.gather(*asked))
            assert audit["clean"] is True
            assert kv == again
            assert "blocks" in kv
            assert "first" in steps
            assert requests["live"] == []

    run(body)


def test_an_engine_that_is_killed_while_it_is_asked_leaves_nobody_waiting() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, _):
            os.kill(supervisor.pid, signal.SIGSTOP)
            asked = asyncio.create_task(supervisor.inspect("kv"))
            await asyncio.sleep(0.05)
            assert not asked.done()
            os.kill(supervisor.pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match="ended while"):
                await asked
            with pytest.raises(EngineDead, match="no engine"):
                await supervisor.inspect("kv")

    run(body)


def test_an_engine_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(connection, "MOST_QUESTIONS", 2)

    async def body() -> None:
        async with supervised() as (watched, _):
            os.kill(watched.pid, signal.SIGSTOP)
            first = [asyncio.create_task(watched.inspect("kv")) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QuireError, match="2 questions"):
                await watched.inspect("kv")
            for asked in first:
                with pytest.raises(EngineDead, match="not answered for"):
                    await asked
            os.kill(watched.pid, signal.SIGCONT)
            monkeypatch.setattr(supervisor, "ANSWER_SECONDS", 300.0)
            assert json.loads(await watched.inspect("audit"))["clean"]  # late answers to nobody do no harm

    run(body)


@pytest.mark.parametrize(
    ("what", "argument", "words"),
    [
        ("nothing", "{}", "there is no question 'nothing'; there are audit, kv"),
        ("steps", "{", "cannot be read"),
        ("steps", "[]", "cannot be read"),
        ("steps", '{"after":"x"}', "cannot be read"),
        ("request", "{}", "cannot be read"),
        ("request", '{"ids":["x"]}', "no such request"),
        ("table", '{"ids":["x"]}', "no live request"),
    ],
)
def test_what_cannot_be_answered_is_said_in_words(what: str, argument: str, words: str) -> None:
    answer = inspected(engine(), Inspect(token=5, what=what, argument=argument))
    assert words in answer.error
    assert (answer.token, answer.body) == (5, b"")


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MAX_BODY_BYTES", 100)
    assert "ask for less" in inspected(engine(), Inspect(token=1, what="kv")).error


def test_without_a_log_what_it_would_know_is_refused_and_the_rest_answered() -> None:
    made = new_run(step_log=0)
    made.add(request("a"))
    made.to_end()
    quiet = Engine(made.scheduler, made.executor)
    for what in ("steps", "requests", "request"):
        assert "step_log is 0" in inspected(quiet, Inspect(token=1, what=what, argument='{"ids":["a"]}')).error
    assert json.loads(inspected(quiet, Inspect(token=1, what="audit")).body)["clean"]
