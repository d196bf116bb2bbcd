"""Requests that are set aside: what they leave to others, what they find when they come back."""

from __future__ import annotations

import pytest

from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, Run, new_run, produced_alone, request
from support.limits import scheduler_config


def steps(run: Run, count: int) -> None:
    for _ in range(count):
        run.one_step()


def test_a_held_request_takes_no_steps_and_goes_on_where_it_was() -> None:
    run = new_run()
    a, b = request("a", 40, 30), request("b", 40, 30)
    run.add(a, b)
    steps(run, 5)
    assert run.scheduler.hold("a")
    said = len(run.tokens["a", 0])
    steps(run, 5)
    assert len(run.tokens["a", 0]) == said
    stats = run.scheduler.stats()
    assert (stats.running, stats.held, sum(stats.waiting.values())) == (1, 1, 0)
    assert run.scheduler.release("a")
    run.to_end()
    assert produced_alone(run, a, b)


def test_it_finds_what_it_had_computed_unless_others_needed_the_blocks() -> None:
    run = new_run(num_blocks=12)
    a = request("a", 64, 40)
    run.add(a)
    steps(run, 20)
    run.scheduler.hold("a")
    assert run.scheduler.stats().blocks_used == 0
    assert run.scheduler.stats().blocks_cached >= 5, "they stay while nobody needs them"
    run.scheduler.release("a")
    batch = run.one_step()
    assert batch is not None
    assert batch.num_tokens <= 16, "no more than the rest of a block is computed again"
    run.scheduler.hold("a")
    other = request("other", 150, 20)  # needs eleven of the twelve
    run.add(other)
    run.to_end()
    assert run.scheduler.stats().total_preemptions == 0, "held blocks go before anybody is preempted"
    assert ("other", 0) in run.finishes
    run.scheduler.release("a")
    run.to_end()
    assert produced_alone(run, a, other)


def test_a_held_request_has_no_seat() -> None:
    run = new_run(max_num_seqs=1)
    a, b = request("a", 20, 30), request("b", 20, 5)
    run.add(a, b)
    steps(run, 3)
    run.scheduler.hold("a")
    run.to_end()
    assert ("b", 0) in run.finishes
    assert not run.scheduler.has_work
    run.scheduler.release("a")
    run.to_end()
    assert produced_alone(run, a, b)


def test_the_elder_that_is_held_is_no_elder_and_comes_back_as_the_youngest() -> None:
    run = new_run()
    run.add(*(request(name, 20, 200) for name in "abc"))
    steps(run, 2)
    elder = run.scheduler._planner.elder
    assert elder is not None
    assert elder.request.request_id == "a"
    run.scheduler.hold("a")
    steps(run, 1)
    assert run.scheduler._planner.elder is run.scheduler._roster.live["b"]
    run.scheduler.release("a")
    assert list(run.scheduler._roster.live) == ["b", "c", "a"]
    steps(run, 3)
    assert run.scheduler._planner.elder is run.scheduler._roster.live["b"]


def test_its_time_aside_does_not_count_for_its_bound() -> None:
    run = new_run()
    run.add(request("a", 20, 30), request("b", 20, 300))
    steps(run, 2)
    bound = run.scheduler.wait_bound("a")
    run.scheduler.hold("a")
    steps(run, bound + 10)  # the invariants are checked after each
    run.scheduler.release("a")
    run.to_end()


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_what_is_held_can_end(end: str) -> None:
    run = new_run()
    run.add(request("a", 20, 30, n=2))
    steps(run, 3)
    run.scheduler.hold("a")
    if end == "abort":
        assert run.scheduler.abort("a")
    else:
        assert [output.choice for output in run.scheduler.fail("a", "no")] == [0, 1]
    run.scheduler.check_invariants()
    assert not run.scheduler.release("a")
    assert (run.scheduler.stats().held, run.scheduler.stats().blocks_used) == (0, 0)


def test_only_live_requests_are_held_and_only_once() -> None:
    run = new_run()
    run.add(request("a", 20, 3))
    assert not run.scheduler.hold("b")
    assert not run.scheduler.release("a")
    assert run.scheduler.hold("a")
    assert not run.scheduler.hold("a")


class SlowGrammars:
    """Ready when told."""

    def __init__(self) -> None:
        self.is_ready = False

    def prepare(self, text: str, scope: str) -> bool:
        return self.is_ready

    def error(self, text: str) -> str | None:
        return None

    def wait(self, seconds: float) -> None:
        pass

    def warm_up(self) -> None:
        pass


def test_a_request_may_be_held_while_its_grammar_is_compiled() -> None:
    from dataclasses import replace

    config = scheduler_config(num_blocks=64)
    grammars, executor = SlowGrammars(), FakeExecutor(config.limits.block_size)
    engine = Engine(Scheduler(config), executor, grammars=grammars, check_invariants=True)
    wanted = request("a", 20, 5)
    engine.submit(replace(wanted, sampling=replace(wanted.sampling, grammar="start: /a/")))
    engine.step()
    engine.hold_request("a")
    grammars.is_ready = True
    for _ in range(3):
        engine.step()
    assert executor.log == []
    assert not engine.has_work
    engine.release_request("a")
    while engine.has_work:
        engine.step()
    assert len(executor.log) == 5
