"""The scheduler's machine with tenants, classes, deadlines and every victim policy; and how far tenants may differ.

What is told of plans is that of `test_scheduler_machine`: stall (I6), elder (I7), wait bound (I17), bypasses (I20) and
the rest hold whoever a request belongs to.
"""

from __future__ import annotations

import dataclasses
import random
from typing import get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from property.test_scheduler_machine import SchedulerMachine, has_entered
from quire_engine.contract.limits import LeastShares, SchedulerConfig, VictimName
from quire_engine.contract.types import DEADLINE_EXCEEDED, GenerationRequest
from quire_engine.scheduling.sequence import Group
from support.limits import scheduler_config
from support.scheduler_model import configs, requests, shrunk_to_fit
from support.simulated_tenants import OUTPUT_COST, PROMPT_COST, Arrival, Machine, simulate

NUM_EXAMPLES = 10  # `make schedule-test` draws many times as many
NUM_STEPS = 40
NUM_RUNS = 3
SHARES = tuple(LeastShares(interactive=i, batch=b) for i, b in ((0, 0), (0, 0.1), (0.5, 0.5), (0.9, 0.1)))


@st.composite
def fair_configs(draw: st.DrawFn) -> SchedulerConfig:
    config = draw(configs())
    limits = dataclasses.replace(
        config.limits,
        scheduling_policy=draw(st.sampled_from(["fcfs", "wfq", "wfq"])),
        preemption_victim=draw(st.sampled_from(get_args(VictimName))),
        class_share=draw(st.sampled_from(SHARES)),
        max_consecutive_chunks=draw(st.integers(0, 3)),
    )
    return dataclasses.replace(config, limits=limits)


@st.composite
def of_tenants(draw: st.DrawFn) -> GenerationRequest:
    tenant = draw(st.sampled_from(["", "a", "b", "c"]))
    return dataclasses.replace(
        draw(requests()),
        tenant=tenant,
        weight=draw(st.sampled_from([0.5, 1.0, 4.0])),
        max_running=2 if tenant == "c" else 0,
        service_class=draw(st.sampled_from(["interactive", "interactive", "batch"])),
        deadline=draw(st.sampled_from([None, None, 0.0, 3.0, 12.0])),  # after its submission
    )


class FairMachine(SchedulerMachine):
    """As the other, with requests of tenants, and time that runs out."""

    @initialize(config=fair_configs())
    def start(self, config: SchedulerConfig) -> None:
        super().start(config)

    @rule(wanted=st.lists(of_tenants(), min_size=1, max_size=5))
    def submit_of_tenants(self, wanted: list[GenerationRequest]) -> None:
        for each in wanted:
            deadline = None if each.deadline is None else self.run.step + each.deadline
            self.add_both(dataclasses.replace(shrunk_to_fit(self.config, each), deadline=deadline))

    def step_both(self, abort: str | None = None, fail_item: int | None = None, hold: str | None = None) -> None:
        now = float(self.run.step)
        ended, ended_too = (run.scheduler.expire(now) for run in (self.run, self.twin))
        assert ended == ended_too
        assert all(output.error_code == DEADLINE_EXCEEDED for output in ended)
        due = {name: self.requests[name].deadline for name in self.unfinished}
        late = {name for name, deadline in due.items() if deadline is not None and deadline <= now}
        assert {(o.request_id, o.choice) for o in ended} == {(name, c) for name in late for c in self.unfinished[name]}
        for name in late:
            del self.unfinished[name]
            self.held.discard(name)  # who is held is not forgotten by its deadline
        super().step_both(None if abort in late else abort, fail_item, None if hold in late else hold)
        self.check_tenants()

    def check_tenants(self) -> None:
        """I16 of tenants: what runs and waits, counted anew, and no account has anything begun when nothing is."""
        scheduler = self.run.scheduler
        stats = {each.tenant: each for each in scheduler.stats().tenants}
        for tenant, each in stats.items():
            live = self.unfinished.keys() - self.held
            own = {name: self.requests[name] for name in live if self.requests[name].tenant == tenant}
            assert each.running + each.waiting == sum(
                len(self.unfinished[name]) if wanted.beam is None else wanted.num_sequences
                for name, wanted in own.items()
            )
            assert each.total_service == PROMPT_COST * each.total_prompt_tokens + OUTPUT_COST * each.total_output_tokens
        accounts = scheduler._planner.accounts._by_tenant
        for payer in accounts.values():
            for account in (payer, *payer.sizes.values()):
                groups = [g for g in scheduler._roster.live.values() if account in (g.account, g.payer)]
                assert account.begun_tokens == sum(group.num_uncharged for group in groups), payer.tenant
            if payer.sizes:
                assert payer.service == sum(account.service for account in payer.sizes.values())

    def count_bypasses(self, waiting: dict[Group, int]) -> None:
        """Who overtakes whom can be told from outside within a class of a tenant, where there is no quota."""
        scheduler = self.run.scheduler
        key = scheduler._roster._order.key
        entered = [g for g in waiting if g.state == "running" and g is not scheduler._planner.elder]
        for group, num_preemptions in waiting.items():
            can_tell = not group.request.max_running and group.wait_reason != "prefix"
            if can_tell and not has_entered(group, num_preemptions):
                name = group.request.request_id
                self.bypasses[name] += sum(g.side == group.side and key(g) > key(group) for g in entered)
                assert self.bypasses[name] <= self.config.limits.max_bypasses  # I20


FairMachine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=NUM_STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestFairness = FairMachine.TestCase


def gap_over_bound(seed: int, policy: str) -> float:
    """Of two tenants that always have requests waiting: the largest difference of their service over the bound."""
    dice = random.Random(seed)
    longest = dice.choice([20, 60, 150])
    config = scheduler_config(
        num_blocks=dice.randint(30, 120),
        block_size=8,
        max_model_len=400,
        max_num_seqs=dice.randint(3, 24),
        max_num_batched_tokens=dice.randint(48, 256),
        prefill_chunk=dice.randint(16, 256),
        itl_target=dice.choice([0.0, 0.1]),
        enable_prefix_caching=False,
        scheduling_policy=policy,
    )
    arrivals = [
        Arrival(at=0.001 * number, tenant=tenant, prompt=dice.randint(1, longest), output=dice.randint(1, most))
        for tenant, most in (("a", 20), ("b", dice.choice([20, 80])))
        for number in range(150)
    ]
    history = simulate(config, arrivals, machine=Machine(0.02, 0.001, 0.001), until=12)
    return history.largest_gap("a", "b") / (2 * max(PROMPT_COST * longest, OUTPUT_COST * config.num_slots))


def test_backlogged_tenants_are_never_further_apart_than_the_bound(request: pytest.FixtureRequest) -> None:
    """I11, with the elder's service charged like any other."""
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    ratios = [gap_over_bound(seed, "wfq") for seed in range(num_runs)]
    assert max(ratios) <= 1.0, f"seed {ratios.index(max(ratios))}"


def test_by_arrival_the_bound_breaks() -> None:
    assert any(gap_over_bound(seed, "fcfs") > 1.0 for seed in range(8))
