"""What the server puts up with from its engine: silence, failures, failed starts."""

from dataclasses import replace

import pytest

from quire_engine.contract.plan import TokenCost
from quire_engine.contract.types import EngineStats
from quire_server.engine.restart_policy import HangLimit, RestartBudget, RestartPolicy
from support.fake_engine_process import make_plan
from support.plans import changed


def test_a_big_model_may_take_long_over_a_step() -> None:
    small, big = make_plan(), changed(make_plan(), model={"num_parameters": 8_000_000_000})
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


def test_what_a_request_is_to_blame_for_does_not_count() -> None:
    budget = RestartBudget(RestartPolicy(max_restarts=1))
    for now in range(100):
        budget.engine_failed(float(now))
        budget.forgive([float(now)])
        assert budget.pause(float(now)) == 0
    budget.engine_failed(200.0)
    budget.engine_failed(201.0)
    assert budget.pause(201.0) is None


def seen(limit: HangLimit, seconds: float, *, prefill: int = 0, decode: int = 0) -> float:
    limit.learn(EngineStats(step_seconds=seconds, prefill_tokens=prefill, decode_tokens=decode))
    return limit.seconds


def test_a_hang_is_five_times_the_longest_step_or_ten_seconds() -> None:
    limit = HangLimit(RestartPolicy())
    assert limit.seconds == 10
    limit.expect(make_plan())
    assert limit.seconds == 10
    assert seen(limit, 1.0, prefill=128) == 10
    assert seen(limit, 3.0, prefill=128) == 15


def test_until_a_large_step_was_seen_the_plans_estimate_counts() -> None:
    """A short prompt came first: the next may be a hundred times as long."""
    plan = changed(make_plan(), model={"num_parameters": 8_000_000_000})
    limit = HangLimit(RestartPolicy())
    limit.expect(plan)
    estimate = RestartPolicy().hang_limit(plan)
    assert estimate > 100
    assert seen(limit, 0.2, prefill=5) == estimate
    assert seen(limit, 4.0, prefill=100, decode=10) == 20


def test_a_gpu_has_time_to_compile_its_kernels() -> None:
    limit = HangLimit(RestartPolicy())
    limit.expect(changed(make_plan(), machine={"device": "cuda"}))
    assert seen(limit, 0.1, prefill=128) == 60


def test_a_long_context_makes_a_step_longer() -> None:
    plan = changed(make_plan(), model={"num_parameters": 10**9}, cost={"layer_attention": 10**5})
    unknown = replace(plan, cost=TokenCost())
    assert RestartPolicy().hang_limit(plan) > RestartPolicy().hang_limit(unknown)
