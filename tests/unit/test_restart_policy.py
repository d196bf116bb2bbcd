"""What the server puts up with from its engine: silence, failures, failed starts."""

from dataclasses import replace

import pytest

from quire_server.engine.restart_policy import RestartBudget, RestartPolicy
from support.fake_engine_process import make_plan


def test_a_big_model_may_take_long_over_a_step() -> None:
    small, big = make_plan(), replace(make_plan(), num_parameters=8_000_000_000)
    policy = RestartPolicy(hang_seconds=60)
    assert policy.hang_limit(small) == 60
    assert policy.hang_limit(big) == pytest.approx(2 * 8e9 * 128 / 2e10)  # 128 tokens a step at 20 GFLOP/s


def test_one_failure_more_than_allowed_gives_up() -> None:
    budget = RestartBudget(RestartPolicy(max_restarts=2, window_seconds=600))
    for now in (0.0, 1.0):
        budget.engine_failed(now)
        assert budget.pause(now) == 0
    budget.start_failed(2.0)
    assert budget.pause(2.0) is None
    assert str(budget) == "the engine failed 3 times in 600 s"


def test_old_failures_are_forgiven() -> None:
    budget = RestartBudget(RestartPolicy(max_restarts=1, window_seconds=10))
    budget.engine_failed(0.0)
    budget.engine_failed(9.0)
    assert budget.pause(10.0) is None
    assert budget.pause(10.5) == 0


def test_failed_starts_back_off_twice_as_long_each_time_until_one_succeeds() -> None:
    budget = RestartBudget(RestartPolicy(max_restarts=100, first_backoff_seconds=3.0))
    pauses = []
    for _ in range(4):
        budget.start_failed(0.0)
        pauses.append(budget.pause(0.0))
    assert pauses == [3.0, 6.0, 10.0, 10.0]
    budget.started()
    budget.engine_failed(1.0)
    assert budget.pause(1.0) == 0
    budget.start_failed(2.0)
    assert budget.pause(2.0) == 3.0
