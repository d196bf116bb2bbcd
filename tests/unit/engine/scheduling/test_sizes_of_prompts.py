"""Sizes of one tenant's prompts under fair queueing: short ones do not wait for long ones, and long ones are served."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.contract.types import GenerationRequest
from quire_engine.scheduling.account import SMALL, size_class
from support.covering import few
from support.fake_executor import Run, new_run, outputs_of, produced_alone, request

LONG = 600  # tokens of a prompt of the second class


def of(tenant: str, name: str, prompt: int | tuple[int, ...], max_tokens: int = 4, **more: object) -> GenerationRequest:
    return dataclasses.replace(request(name, prompt, max_tokens, **more), tenant=tenant)


def fair_run(**limits: object) -> Run:
    defaults = {"scheduling_policy": "wfq", "num_blocks": 600, "max_num_seqs": 4, "elder_age_steps": 100_000}
    return new_run(**{"max_num_batched_tokens": 128, "prefill_chunk": 128, **defaults, **limits})


def entries(run: Run) -> list[str]:
    """Request ids in the order of their first tokens."""
    return list(dict.fromkeys(each.request_id for each in run.outputs))


def test_the_classes_end_at_256_and_eight_times_as_much_each() -> None:
    assert [size_class(n) for n in (0, 1, SMALL, SMALL + 1, 8 * SMALL, 8 * SMALL + 1, 64 * SMALL, 64 * SMALL + 1)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
        3,
    ]


@pytest.mark.parametrize("tenant", few(["", "one"], "one"))
def test_short_prompts_enter_before_forty_long_ones_of_the_same_tenant(tenant: str) -> None:
    """By arrival almost all of the forty come first."""
    positions = {}
    for policy in ("wfq", "fcfs"):
        run = fair_run(scheduling_policy=policy)
        long = [of(tenant, f"long{number}", LONG) for number in range(40)]
        short = [of(tenant, f"short{number}", 20) for number in range(4)]
        run.add(*long)
        for _ in range(3):
            run.one_step()
        run.add(*short)
        run.to_end()
        assert produced_alone(run, *long, *short)
        order = entries(run)
        positions[policy] = max(order.index(one.request_id) for one in short)
    assert positions["wfq"] <= 4 + 3, "beside those that had begun at most"
    assert positions["fcfs"] > 30


def test_long_prompts_have_their_half_under_a_flood_of_short_ones() -> None:
    """A short one arrives for each that ends, so there are always some that wait."""
    run = fair_run(max_num_seqs=6)
    run.add(*[of("one", f"long{number}", LONG) for number in range(30)])
    served, number, live = {"long": 0, "short": 0}, 0, 0
    while run.step < 150:
        live = sum(1 for name in run.scheduler._roster.live if name.startswith("short"))
        for _ in range(12 - live):
            run.add(of("one", f"short{number}", 100))
            number += 1
        before = len(run.log)
        run.one_step()
        for batch in run.log[before:]:
            for item in batch.items:
                kind = "long" if item.num_prompt_tokens == LONG else "short"
                served[kind] += len(item.token_ids)
    share = served["long"] / sum(served.values())
    assert 0.4 < share < 0.6


def test_requests_of_one_size_keep_the_order_of_arrival() -> None:
    run = fair_run(max_num_seqs=1)
    run.add(*[of("", name, LONG if name[0] == "l" else 20) for name in ("l1", "s1", "l2", "s2", "l3", "s3", "l4")])
    run.to_end()
    order = entries(run)
    assert [name for name in order if name[0] == "l"] == ["l1", "l2", "l3", "l4"]
    assert [name for name in order if name[0] == "s"] == ["s1", "s2", "s3"]


def test_where_all_are_of_one_size_and_tenant_the_order_is_that_of_arrival() -> None:
    histories = []
    for policy in ("wfq", "fcfs"):
        run = fair_run(scheduling_policy=policy)
        run.add(*[of("", f"r{number}", 20 + number % 7, 3 + number % 5) for number in range(30)])
        run.to_end()
        histories.append([[item.sequence_id for item in batch.items] for batch in run.log])
    assert histories[0] == histories[1]


def test_a_long_prompt_with_a_cached_prefix_is_a_short_one() -> None:
    """What is to be computed counts, not what is read."""
    run = fair_run()
    first = of("", "first", LONG)
    run.add(first)
    run.to_end()
    run.add(*[of("", f"long{number}", LONG) for number in range(20)])
    run.one_step()
    again = of("", "again", (*first.prompt_token_ids, *range(30)))
    run.add(again)
    group = run.scheduler._roster.live["again"]
    assert group.account is group.payer.of_size(0)
    run.to_end()
    assert entries(run).index("again") <= 4
    assert outputs_of(run, "again")[-1].num_cached_tokens >= LONG - 16


def test_sizes_of_one_tenant_do_not_add_to_its_share() -> None:
    """A tenant with prompts of two sizes gets no more than one with prompts of one size."""
    run = fair_run()
    run.add(*[of("mixed", f"m{number}", LONG if number % 2 else 100) for number in range(60)])
    run.add(*[of("plain", f"p{number}", LONG) for number in range(60)])
    while run.step < 150:
        run.one_step()
    service = {each.tenant: each.total_service for each in run.scheduler.stats().tenants}
    assert service["mixed"] == pytest.approx(service["plain"], rel=0.1)


def test_held_and_released_it_waits_among_its_own_size_again() -> None:
    run = fair_run(max_num_seqs=2)
    run.add(*[of("", f"long{number}", LONG) for number in range(10)])
    run.one_step()
    run.add(held := of("", "held", 20), short := of("", "short", 20))
    assert run.scheduler.hold("held")
    for _ in range(20):
        run.one_step()
    assert "short" in run.finish_step
    assert ("held", 0) not in run.tokens
    assert run.scheduler.release("held")
    run.to_end()
    assert produced_alone(run, held, short)
    assert entries(run).index("held") < 8
    accounts = run.scheduler._planner.accounts._by_tenant[""]
    assert {account.begun_tokens for account in (accounts, *accounts.sizes.values())} == {0}
    assert accounts.service == sum(account.service for account in accounts.sizes.values())
