"""Shares of seats and blocks: a tenant within its share takes them from one above, and none starves another."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from itertools import pairwise

import pytest

from quire_engine.contract.types import GenerationRequest, PreemptionCause
from quire_engine.scheduling.sequence import Group
from support.fake_executor import DEAR, Run, new_run, produced_alone, request
from support.limits import scheduler_config
from support.simulated_tenants import Arrival, History, Machine, simulate


def of(
    tenant: str, name: str, prompt: int = 8, max_tokens: int = 40, *, weight: float = 1.0, n: int = 1
) -> GenerationRequest:
    return dataclasses.replace(request(f"{tenant}-{name}", prompt, max_tokens, n=n), tenant=tenant, weight=weight)


def fair_run(**limits: object) -> Run:
    """Four seats, blocks enough, and an elder that stays what it is."""
    defaults = {"scheduling_policy": "wfq", "preemption_victim": "least-lost", "admission": "expected"}
    return new_run(**{"max_num_seqs": 4, "elder_age_steps": 100_000, **defaults, **limits})


def running(run: Run) -> list[str]:
    return [group.request.request_id for group in run.scheduler._roster.running]


def group(run: Run, name: str) -> Group:
    return run.scheduler._roster.live[name]


def causes(run: Run) -> dict[PreemptionCause, int]:
    return {cause: count for cause, count in run.scheduler.stats().total_preemptions_by_cause.items() if count}


def seats(run: Run) -> Counter[str]:
    return Counter(name[0] for name in running(run))


def steps(run: Run, count: int) -> None:
    for _ in range(count):
        run.one_step()


# ---- seats ---------------------------------------------------------------------------------------------------------


def test_a_tenant_within_its_share_takes_the_seat_that_loses_least() -> None:
    run = fair_run()
    wanted = [of("a", str(number), 10 * (number + 1), 60) for number in range(4)]
    run.add(*wanted)
    steps(run, 5)
    assert len(running(run)) == 4
    run.add(late := of("b", "0"))
    run.one_step()
    assert sorted(running(run)) == ["a-0", "a-2", "a-3", "b-0"], "the first is the elder; of the others 1 has least"
    assert causes(run) == {"share": 1}
    run.to_end()
    assert produced_alone(run, *wanted, late)


def test_it_takes_seats_until_each_has_its_half() -> None:
    run = fair_run(max_num_seqs=8)
    run.add(*[of("a", str(number), 10, 200) for number in range(12)])
    steps(run, 3)
    run.add(*[of("b", str(number), 10, 200) for number in range(12)])
    steps(run, 20)
    assert seats(run) == {"a": 4, "b": 4}
    assert causes(run) == {"share": 4}


def test_shares_are_by_weight() -> None:
    """Weights 1 and 3: of eight seats the light tenant keeps two, that of the elder among them."""
    run = fair_run(max_num_seqs=8)
    run.add(*[of("a", str(number), 10, 200) for number in range(12)])
    steps(run, 3)
    run.add(*[of("b", str(number), 10, 200, weight=3.0) for number in range(12)])
    steps(run, 20)
    assert seats(run) == {"a": 2, "b": 6}


def test_a_tenant_above_its_share_never_preempts() -> None:
    """Weights 3 and 1, and the light one comes late with more than enough: it takes the two seats above six."""
    run = fair_run(max_num_seqs=8)
    run.add(*[of("b", str(number), 10, 200, weight=3.0) for number in range(12)])
    steps(run, 3)
    run.add(*[of("a", str(number), 10, 200) for number in range(12)])
    steps(run, 60)
    assert seats(run) == {"a": 2, "b": 6}
    assert causes(run) == {"share": 2}


def test_the_elder_is_never_the_victim() -> None:
    """The elder holds two of two seats with its choices: a tenant within its share waits for its end."""
    run = fair_run(max_num_seqs=2)
    run.add(of("a", "elder", 10, 40, n=2))
    steps(run, 3)
    run.add(of("b", "0", 10, 4))
    while "a-elder" not in run.finish_step:
        run.one_step()
        assert "b-0" not in running(run) or "a-elder" not in running(run)
    assert causes(run) == {}
    run.to_end()


def test_a_single_seat_is_no_excess() -> None:
    """Three tenants and two seats: shares are less than a seat, and a tenant that has one keeps it."""
    run = fair_run(max_num_seqs=2)
    run.add(of("a", "0", 10, 40), of("b", "0", 10, 40))
    steps(run, 3)
    run.add(of("c", "0", 10, 4))
    run.to_end()
    assert causes(run) == {}


def test_a_group_that_has_just_entered_keeps_its_seats_for_the_step() -> None:
    """Its tenant is above its share by this group alone: preempted at once, it would have entered for nothing."""
    run = fair_run()
    run.add(elder := of("c", "elder", 10, 40))
    steps(run, 3)
    run.add(wide := of("a", "wide", n=3), late := of("b", "0"))
    run.one_step()
    assert running(run) == ["c-elder", "a-wide"]
    assert causes(run) == {}
    run.one_step()
    assert running(run) == ["c-elder", "b-0"]
    assert causes(run) == {"share": 1}
    run.to_end()
    assert produced_alone(run, elder, wide, late)


@pytest.mark.parametrize("tenant", ["a", ""])
def test_one_tenant_or_none_takes_nothing_from_itself(tenant: str) -> None:
    run = fair_run()
    run.add(*[of(tenant, str(number), 10 if number % 2 else 600, 40) for number in range(20)])
    run.to_end()
    assert causes(run) == {}


def test_only_fair_queueing_has_shares() -> None:
    run = fair_run(scheduling_policy="fcfs")
    run.add(*[of("a", str(number), 10, 60) for number in range(4)])
    steps(run, 3)
    run.add(of("b", "0"))
    steps(run, 5)
    assert {name[0] for name in running(run)} == {"a"}
    run.to_end()
    assert causes(run) == {}


# ---- blocks --------------------------------------------------------------------------------------------------------


def test_a_tenant_within_its_share_of_blocks_enters_a_full_pool() -> None:
    """Four groups of six blocks fill the pool of 24; six blocks are within the half of the other tenant."""
    run = fair_run(num_blocks=24, max_num_seqs=16, admission="prompt")
    run.add(*[of("a", str(number), 90, 6) for number in range(8)])
    steps(run, 2)
    assert run.scheduler.stats().blocks_used == 24
    run.add(of("b", "0", 90, 6), of("b", "1", 180, 6))
    run.one_step()
    assert "b-0" in running(run)
    assert "b-1" not in running(run), "with it the tenant would hold three quarters"
    assert causes(run) == {"share": 1}
    run.to_end()


def test_it_enters_where_the_pool_is_expected_to_run_short() -> None:
    """The long outputs of another tenant will want all blocks; those that are free now are within the share."""
    for tenant, enters in (("b", True), ("a", False)):
        run = fair_run(num_blocks=32, seconds_per_token=DEAR)
        run.add(of("a", "0", 120, 280), of(tenant, "late", 100, 200))
        steps(run, 4)
        assert (f"{tenant}-late" in running(run)) is enters


def test_growth_preempts_the_tenant_above_its_share_and_not_the_one_that_has_lost_least() -> None:
    run = fair_run(num_blocks=24, max_num_seqs=16, admission="prompt", elder_age_steps=0)
    run.add(of("c", "elder", 8, 250))
    wanted = [of("a", str(number), 60, 60) for number in range(4)]
    run.add(*wanted, small := of("b", "0", 8, 100))
    while not causes(run):
        run.one_step()
    preempted = [each.request.request_id for each in run.scheduler._roster.waiting]
    assert [name[0] for name in preempted] == ["a"]
    assert group(run, "b-0").num_preemptions == 0
    assert group(run, "b-0").leader.kv.num_computed < 60, "it would have lost least of all"
    run.to_end()
    assert produced_alone(run, *wanted, small)


def test_every_tenant_comes_to_its_end_however_they_preempt_each_other(pytestconfig: pytest.Config) -> None:
    seen: Counter[PreemptionCause] = Counter()
    for seed in range(int(pytestconfig.getoption("--times", 1))):
        dice = random.Random(seed)
        run = fair_run(num_blocks=24, max_num_seqs=6, elder_age_steps=10, num_host_blocks=dice.choice([0, 20]))
        wanted = [
            of(
                dice.choice("abc"),
                str(number),
                dice.randint(1, 120),
                dice.randint(1, 120),
                n=dice.choice([1, 1, 2]),
                weight=dice.choice([1, 1, 3]),
            )
            for number in range(24)
        ]
        for one in wanted:
            run.add(one)
            steps(run, dice.randint(0, 6))
        run.to_end()
        assert produced_alone(run, *wanted)
        assert run.scheduler.stats().blocks_used == 0
        seen.update(causes(run))
    assert set(seen) == {"blocks", "elder", "share"}


# ---- Fill and Squeeze ----------------------------------------------------------------------------------------------


def squeezed(*, attack: bool, fair: bool) -> History:
    """A tenant fills the pool with long outputs, which squeeze out the short requests of another one."""
    policies = {"scheduling_policy": "wfq", "preemption_victim": "least-lost", "admission": "expected"}
    config = scheduler_config(
        num_blocks=256, max_num_seqs=32, itl_target=0.0, enable_prefix_caching=False, **(policies if fair else {})
    )
    fill = [Arrival(at=2.0 + number * 0.02, tenant="fill", prompt=20, output=1200) for number in range(40)]
    chats = [Arrival(at=1.0 + number * 0.7, tenant="chat", prompt=60, output=24) for number in range(40)]
    return simulate(config, [*(fill if attack else []), *chats], machine=Machine(0.02, 0.0003, 0.0005), until=40)


@pytest.fixture(scope="module")
def attacked() -> dict[bool, History]:
    """With shares, and by arrival and prompt alone."""
    return {fair: squeezed(attack=True, fair=fair) for fair in (True, False)}


def test_short_requests_of_one_tenant_are_not_squeezed_out_by_long_outputs_of_another(
    attacked: dict[bool, History],
) -> None:
    alone = squeezed(attack=False, fair=True).p95("chat")
    assert attacked[True].finished["chat"] == 40
    assert attacked[True].p95("chat") <= 2 * alone
    assert attacked[False].p95("chat") > 10 * alone


def test_the_tenant_with_long_outputs_gets_what_is_left(attacked: dict[bool, History]) -> None:
    """The shares take little from it, and it never stands still."""
    assert attacked[True].total("fill") > 0.8 * attacked[False].total("fill")
    times = [at for at, who, amount in attacked[True].service if who == "fill" and amount]
    assert max(later - earlier for earlier, later in pairwise(times)) < 1.0


# ---- cached prefixes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_running", [2, 0])
def test_of_its_share_of_the_cache_a_tenant_loses_only_what_requests_that_run_hold(max_running: int) -> None:
    """A third of the pool is cached for the victim, within its half; unique prompts flood it before it returns.

    Its own request evicts nothing of its own. With few running at once it loses nothing, without a limit the rest.
    """
    run = fair_run(num_blocks=48, block_size=4, max_num_seqs=16)
    victim = dataclasses.replace(of("v", "0", 65, 1), prompt_token_ids=tuple(range(1000, 1065)), cache_salt="v\0")
    run.add(victim)
    run.to_end()
    most = 0
    for number in range(12):
        prompt = tuple(range(2000 + 100 * number, 2000 + 100 * number + 36))
        asked = of("a", str(number), 36, 8)
        run.add(dataclasses.replace(asked, prompt_token_ids=prompt, max_running=max_running, cache_salt="a\0"))
    while run.scheduler._roster.live:
        run.one_step()
        most = max(most, sum(each.num_held_blocks for each in run.scheduler._roster.running))
    before = run.scheduler.stats().total_prefix_hit_tokens
    run.add(dataclasses.replace(victim, request_id="v-1"))
    run.to_end()
    kept = run.scheduler.stats().total_prefix_hit_tokens - before
    assert kept >= 4 * min(16, 48 - most)
    assert (kept == 64) == bool(max_running), f"{kept} tokens, beside {most} of 48 blocks that ran"
