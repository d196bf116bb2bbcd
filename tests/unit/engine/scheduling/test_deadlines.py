"""Deadlines in the engine: in the queue, in decode, while a grammar is compiled; whoever resumes a request keeps it."""

from __future__ import annotations

import dataclasses
from unittest.mock import Mock

from quire_engine.contract.types import DEADLINE_EXCEEDED, GenerationRequest, StepOutput, TokenOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Deadlines, Scheduler
from quire_server.engine.recovery import JournalEntry
from support.fake_executor import FakeExecutor, new_run, produced_alone, request
from support.limits import scheduler_config


def due(name: str, at: float, prompt: int = 8, max_tokens: int = 50, n: int = 1) -> GenerationRequest:
    return dataclasses.replace(request(name, prompt, max_tokens, n=n), deadline=at)


def test_it_ends_in_decode_and_its_blocks_are_free_at_once() -> None:
    run = new_run()
    run.add(due("a", 5.0, n=2), other := request("b", 8, 20))
    while run.step < 5:
        assert run.scheduler.expire(float(run.step)) == []
        run.one_step()
    used = run.scheduler.stats().blocks_used
    ended = run.scheduler.expire(5.0)
    assert {(o.request_id, o.choice, o.finish, o.error_code) for o in ended} == {
        ("a", choice, "error", DEADLINE_EXCEEDED) for choice in (0, 1)
    }
    assert not any(output.culprit for output in ended)
    assert run.scheduler.stats().blocks_used < used
    assert run.scheduler.expire(6.0) == []
    run.to_end()
    assert produced_alone(run, other)


def test_it_ends_in_the_queue() -> None:
    run = new_run(max_num_seqs=1)
    run.add(request("a", 8, 20), due("b", 3.0))
    for _ in range(3):
        run.one_step()
    (ended,) = run.scheduler.expire(3.0)
    assert (ended.request_id, ended.timing) == ("b", None)
    run.to_end()


def test_a_result_that_comes_after_the_deadline_is_passed_over() -> None:
    run = new_run()
    run.add(due("a", 1.0))
    batch = run.scheduler.schedule(0.5)
    assert batch is not None
    result = run.executor.execute(batch)
    assert len(run.scheduler.expire(1.0)) == 1
    assert run.scheduler.apply(batch, result, 1.1) == []


def test_the_engine_tells_before_it_computes() -> None:
    clock = Mock(return_value=0.0)
    told: list[TokenOutput] = []
    config = scheduler_config(num_blocks=16)
    executor = FakeExecutor(config.limits.block_size)
    engine = Engine(Scheduler(config), executor, clock=clock)
    engine.on_step = lambda step: told.extend(step.outputs)
    engine.submit(due("a", 2.0))
    engine.step()
    clock.return_value = 2.5
    engine.step()
    assert [output.error_code for output in told] == ["", DEADLINE_EXCEEDED]
    assert not engine.has_work


def test_a_grammar_that_takes_longer_than_the_request_has() -> None:
    clock = Mock(return_value=0.0)
    steps: list[StepOutput] = []
    grammars = Mock(prepare=Mock(return_value=False))
    config = scheduler_config(num_blocks=16)
    engine = Engine(Scheduler(config), FakeExecutor(16), grammars=grammars, clock=clock)
    engine.on_step = steps.append
    wanted = due("a", 2.0)
    engine.submit(dataclasses.replace(wanted, sampling=dataclasses.replace(wanted.sampling, grammar="start: /a/")))
    engine.step()
    assert steps == []
    clock.return_value = 2.0
    engine.step()
    assert [output.error_code for step in steps for output in step.outputs] == [DEADLINE_EXCEEDED]
    assert not engine.has_work


def test_a_resumed_request_keeps_whose_it_is_and_when_it_is_due() -> None:
    wanted = dataclasses.replace(
        due("a", 7.5), tenant="t", weight=3.0, max_running=4, service_class="batch", arrival_time=1.0
    )
    entry = JournalEntry(wanted)
    entry.record(TokenOutput(request_id="a", token_ids=(5,)))
    assert entry.resumed_request() == dataclasses.replace(wanted, resumed_token_ids=((5,),))


def test_requests_that_have_ended_leave_nothing_behind() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(due(str(number), 1e9 + number), live=(str(number),))
    assert len(deadlines._heap) < 100
    assert deadlines.due(0.0) == []
