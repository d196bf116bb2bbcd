"""Streams that an earlier engine has begun enter first, the oldest before the others, and break nobody's bound.

Random engines, busy with others, get streams of an engine that is gone: under every policy, with invariants after each
step.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from property.test_elder_bound import worst_ratio
from quire_engine.contract.limits import PolicyName
from quire_engine.contract.types import GenerationRequest
from quire_engine.scheduling.sequence import Group
from support.covering import few
from support.fake_executor import Run, expected_tokens, new_run, request

POLICIES: tuple[PolicyName, ...] = ("wfq", "fcfs", "priority", "lpm", "dlpm")
NUM_RUNS = 14  # of each policy; `make property-test` does many times as many


def busy_run(dice: random.Random, policy: PolicyName) -> Run:
    """Nobody overtakes who is blocked, so that the order of entering is the order of the queue."""
    seats = dice.randint(1, 6)
    return new_run(
        num_blocks=dice.randint(8, 40),
        block_size=4,
        max_model_len=64,
        max_num_seqs=seats,
        max_num_batched_tokens=seats + dice.randint(4, 24),
        prefill_chunk=dice.randint(4, 16),
        min_chunk=4,
        max_bypasses=0,
        elder_age_steps=dice.choice([4, 1000]),
        enable_prefix_caching=False,
        scheduling_policy=policy,
    )


def any_request(dice: random.Random, name: str, *, is_moved: bool) -> GenerationRequest:
    wanted = dataclasses.replace(
        request(name, dice.randint(1, 20), dice.randint(2, 10), arrival=dice.random(), priority=dice.randint(0, 2)),
        tenant=dice.choice(["", "a", "b"]),
        service_class=dice.choice(["interactive", "interactive", "batch"]),
    )
    if not is_moved:
        return wanted
    given = expected_tokens(wanted, 0)[: dice.randint(1, wanted.stop.max_new_tokens - 1)]
    return dataclasses.replace(wanted, resumed_token_ids=(given,))


def turn(group: Group, policy: PolicyName) -> tuple[float, ...]:
    """Whom nobody with a greater one may overtake; only moved streams have an order that all policies keep."""
    first = group.request.priority if policy == "priority" else 0
    return (first, 0, group.request.arrival_time) if group.is_resumed else (first, 1)


def check_order(run: Run, waited: dict[Group, int], policy: PolicyName) -> int:
    """After a step: whoever entered had no moved stream of its class before it. Returns how many moved ones entered.

    `waited`: how often each had been preempted; one that has entered and was preempted for a tenant's share was served.
    """
    entered = [group for group in waited if group.state == "running" and group is not run.scheduler._planner.elder]
    left = [
        group
        for group, before in waited.items()
        if group.state in ("waiting", "preempted") and group.is_resumed and group.num_preemptions == before
    ]
    for group in entered:
        for other in left:
            if group.is_batch == other.is_batch:
                assert turn(group, policy) < turn(other, policy), (group.request, other.request)
    return sum(group.is_resumed for group in entered)


@pytest.mark.parametrize("policy", few(POLICIES, "fcfs", "wfq"))
def test_moved_streams_enter_before_those_that_have_not_begun(policy: PolicyName, pytestconfig: pytest.Config) -> None:
    num_runs, num_moved = NUM_RUNS * int(pytestconfig.getoption("--times", 1)), 0
    for seed in range(num_runs):
        dice = random.Random(seed)
        run = busy_run(dice, policy)
        wanted = [any_request(dice, f"r{i}", is_moved=8 <= i < 16) for i in range(24)]
        bounds = {}
        for first in (0, 8, 16):
            part = wanted[first : first + 8]
            run.add(*part)
            bounds |= {one.request_id: run.step + run.scheduler.wait_bound(one.request_id) for one in part}
            for _ in range(dice.randint(0, 6) if first < 16 else 100_000):
                waited = {group: group.num_preemptions for group in run.scheduler._roster.waiting}
                if run.one_step() is None:
                    break
                num_moved += check_order(run, waited, policy)
        for one in wanted:
            given = one.resumed_token_ids[0] if one.resumed_token_ids else ()
            assert (*given, *run.tokens[one.request_id, 0]) == expected_tokens(one, 0)
            assert run.finish_step[one.request_id] <= bounds[one.request_id]
    assert num_moved > 4 * num_runs


def test_a_moved_stream_is_not_the_first_to_lose_its_blocks() -> None:
    """It has run longer than those beside it, though it came to this engine last."""
    run = new_run(num_blocks=18, block_size=4, max_model_len=40, max_num_seqs=3, enable_prefix_caching=False)
    run.add(request("new", 8, 24), request("newer", 8, 24))
    run.one_step()
    moved = request("moved", 8, 24)
    run.add(dataclasses.replace(moved, resumed_token_ids=(expected_tokens(moved, 0)[:4],)))
    run.one_step()
    (group,) = (group for group in run.scheduler._roster.running if group.is_resumed)
    run.to_end()
    assert run.scheduler.stats().total_preemptions
    assert group.num_preemptions == 0


def test_moved_streams_break_no_printed_bound(pytestconfig: pytest.Config) -> None:
    num_runs = 5 * NUM_RUNS * int(pytestconfig.getoption("--times", 1))
    ratios = [worst_ratio(seed, with_elder=True, resumed=0.4) for seed in range(num_runs)]
    assert max(ratios) <= 1.0, f"seed {ratios.index(max(ratios))}"
    assert max(ratios) > 0.5
