"""The prefix cache emptied at any moment: nothing is found afterwards, nobody's tokens change, a replay does it too.

The random runs are those of the scheduler one step ahead with swaps, and of the step log, with orders between steps.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from property.test_step_log_replay import Traffic, lines_of, plans, replayed
from property.test_swapping import AheadWithSwaps
from quire_engine.contract.types import RESET_PREFIX_CACHE
from quire_engine.engine import Engine
from support.fake_executor import new_run, produced_alone, request
from support.seeds import naming

NUM_RUNS = 50  # `make property-test` does many times as many
NUM_LOGS = 5


class Emptied(AheadWithSwaps):
    """A run whose cache is emptied now and then, with a step in flight or without."""

    def step(self) -> None:
        if random.Random(self.steps * 7919 + len(self.requests)).random() < 0.15:
            answer = self.engine.control(RESET_PREFIX_CACHE, {})
            assert isinstance(answer, dict)
            self.seen["device"] += answer["device_blocks"]
            self.seen["host"] += answer["host_blocks"]
            assert len(self.executor.forgotten) == self.seen["host"]
            stats = self.run.scheduler.stats()
            assert stats.host_blocks_cached == 0
            self.run.scheduler.check_invariants()
        super().step()


class EmptiedTraffic(Traffic):
    def disturb(self, number: int) -> None:
        if number % 9 == 8:
            self.engine.control(RESET_PREFIX_CACHE, {})
        super().disturb(number)


def test_nobodys_tokens_change(request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    for seed in range(num_runs):
        run = Emptied(seed)
        with naming(seed):
            run.play()
        seen += run.seen
    assert all(seen[what] > num_runs / 20 for what in ("device", "host", "swap", "in", "copies", "forks")), seen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_log_with_orders_replays_to_the_same_plans:
        metafunc.parametrize("seed", range(NUM_LOGS * int(metafunc.config.getoption("--times", 1))))


def test_a_log_with_orders_replays_to_the_same_plans(seed: int, tmp_path: Path) -> None:
    lines = lines_of(EmptiedTraffic(seed).scheduler)
    assert any(line["kind"] == "reset" for line in lines)
    scheduler, difference = replayed(lines, tmp_path)
    assert difference is None
    assert plans(lines_of(scheduler)) == plans(lines)


def test_a_log_that_lacks_them_does_not(tmp_path: Path) -> None:
    def differs(seed: int) -> bool:
        lines = lines_of(EmptiedTraffic(seed).scheduler)
        return replayed([line for line in lines if line["kind"] != "reset"], tmp_path)[1] is not None

    assert any(map(differs, range(15)))


def test_what_was_computed_is_found_before_and_not_after() -> None:
    run = new_run()
    engine = Engine(run.scheduler, run.executor)
    prefix = tuple(range(100, 140))
    first, second, third = (request(name, (*prefix, last), 3) for last, name in enumerate("abc"))
    run.add(first)
    run.to_end()
    run.add(second)
    run.to_end()
    assert run.scheduler.stats().total_prefix_hit_tokens >= 32
    found = run.scheduler.stats().total_prefix_hit_tokens
    cached = run.scheduler.stats().blocks_cached
    assert engine.control(RESET_PREFIX_CACHE, {}) == {"device_blocks": cached, "host_blocks": 0}
    assert (run.scheduler.stats().blocks_cached, run.scheduler.stats().blocks_used) == (0, 0)
    run.add(third)
    run.to_end()
    assert run.scheduler.stats().total_prefix_hit_tokens == found
    assert produced_alone(run, first, second, third)


def test_who_runs_goes_on_and_is_found_no_more() -> None:
    run = new_run()
    engine = Engine(run.scheduler, run.executor)
    prefix = tuple(range(100, 140))
    runs, comes = request("runs", prefix, 30), request("comes", (*prefix, 7), 5)
    run.add(runs)
    for _ in range(10):
        run.one_step()
    used = run.scheduler.stats().blocks_used
    assert engine.control(RESET_PREFIX_CACHE, {}) == {"device_blocks": 0, "host_blocks": 0}
    assert run.scheduler.stats().blocks_used == used
    run.add(comes)
    run.to_end()
    assert run.scheduler.stats().total_prefix_hit_tokens == 0
    assert produced_alone(run, runs, comes)
