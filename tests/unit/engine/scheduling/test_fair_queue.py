"""Fair queueing on the real scheduler: the runs of the paper's artifact, and what one tenant can do to another."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import BeamParams, SamplingParams
from support.fake_executor import new_run, request
from support.limits import scheduler_config
from support.simulated_tenants import Arrival, History, Machine, simulate

POOL_TOKENS = 4_000
LENGTH = 128  # of prompts and of outputs
A10G = Machine(fixed=0.02, prompt_token=0.0002, decode=0.0012)  # about what the artifact's runs took


def config(policy: str, **limits: object) -> SchedulerConfig:
    """A pool as tight as the artifact's, where memory is what tenants compete for."""
    return scheduler_config(
        **{
            "num_blocks": POOL_TOKENS // 16,
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "prefill_chunk": 2048,
            "itl_target": 0.0,
            "scheduling_policy": policy,
            "enable_prefix_caching": False,
            **limits,
        }
    )


def poisson(rate: float, tenant: str, *, until: float, weight: float = 1.0, since: float = 0.0) -> Iterator[Arrival]:
    dice, at = random.Random(tenant), since
    while (at := at + dice.expovariate(rate)) < until:
        yield Arrival(at=at, tenant=tenant, prompt=LENGTH, output=LENGTH, weight=weight)


def bound() -> int:
    """Of the theorem, with its weights: no gap is larger than twice what one side can have in the pool."""
    return 2 * max(LENGTH, 2 * POOL_TOKENS)


@pytest.fixture(scope="module")
def overload() -> dict[str, History]:
    """One tenant asks for twice as much as the other, and each for more than half of the machine."""
    arrivals = [*poisson(2.5, "a", until=30), *poisson(5.0, "b", until=30)]
    return {policy: simulate(config(policy), arrivals, until=30, machine=A10G) for policy in ("wfq", "fcfs")}


def test_who_asks_for_twice_as_much_gets_no_more(overload: dict[str, History]) -> None:
    fair, served = overload["wfq"], overload["fcfs"]
    assert fair.total("b", 10) / fair.total("a", 10) == pytest.approx(1.0, abs=0.05)
    assert served.total("b", 10) / served.total("a", 10) > 1.7  # by arrival: about what was asked for
    assert fair.largest_gap("a", "b") < bound() / 4
    assert served.largest_gap("a", "b") > 2 * fair.largest_gap("a", "b")


def test_fair_shares_cost_no_throughput(overload: dict[str, History]) -> None:
    fair, served = (sum(overload[policy].finished.values()) for policy in ("wfq", "fcfs"))
    assert fair > 0.95 * served


def test_weights_are_shares() -> None:
    arrivals = [each for w in (1, 2, 3, 4) for each in poisson(2.0 * w, str(w), until=30, weight=w)]
    history = simulate(config("wfq"), arrivals, until=30, machine=A10G)
    shares = [history.total(str(w), 10) / history.total("1", 10) for w in (1, 2, 3, 4)]
    assert shares == pytest.approx([1, 2, 3, 4], rel=0.05)


@pytest.mark.matrix  # weights are tried beside it
def test_two_tenants_of_weights_1_and_2_with_a_short_queue() -> None:
    """As a server would have it: a bounded number of requests each, a new one for each that ends, prompts in chunks."""
    arrivals = [each for w in (1, 2) for each in poisson(4.0, str(w), until=60, weight=w)]
    tight = config("wfq", num_blocks=400, max_num_seqs=12, max_num_batched_tokens=256, prefill_chunk=256)
    history = simulate(tight, arrivals, until=60, machine=A10G)
    assert history.total("2", 10) / history.total("1", 10) == pytest.approx(2.0, rel=0.05)


@pytest.mark.matrix  # as the property of fair shares in tests/property
def test_idle_time_is_no_credit() -> None:
    """On and off: who comes back after a pause competes from then on, and does not catch up."""
    arrivals = [*poisson(5.0, "a", until=60), *poisson(5.0, "b", until=60, since=30)]
    history = simulate(config("wfq"), arrivals, until=60, machine=A10G)
    a, b = (history.total(tenant, 35) for tenant in "ab")
    assert 0.9 < b / a < 1.4  # more than its half at first, since what the other has running is charged as it comes
    assert history.largest_gap("a", "b") < bound()


def flooded(policy: str, machine: Machine, *, flood: bool) -> History:
    """Short chats of one tenant, and a hundred long prompts of another at once."""
    dice, chats, at = random.Random(5), [], 0.0
    while (at := at + dice.expovariate(1.5)) < 60:
        chats.append(Arrival(at=at, tenant="chat", prompt=dice.randint(30, 120), output=dice.randint(20, 60)))
    long = [Arrival(at=5.0, tenant="long", prompt=1500, output=32) for _ in range(100 if flood else 0)]
    limits = {"num_blocks": 2000, "max_num_batched_tokens": 512, "prefill_chunk": 512, "itl_target": 0.1}
    return simulate(config(policy, max_num_seqs=32, **limits), [*chats, *long], machine=machine, until=120)


def test_a_hundred_long_prompts_of_one_tenant_hardly_delay_the_chats_of_another() -> None:
    cpu = Machine(0.03, 0.0012, 0.002)  # 800 prompt tokens a second
    alone = flooded("wfq", cpu, flood=False).p95("chat")
    fair, served = (flooded(policy, cpu, flood=True).p95("chat") for policy in ("wfq", "fcfs"))
    assert fair <= 1.5 * alone
    assert served > 20 * alone  # what it is without fair queueing


@pytest.mark.matrix  # the same flood as above, on another machine
def test_on_a_fast_machine_the_delay_is_about_a_step() -> None:
    """Alone a chat waits for hardly anything there; beside a flood each step is as long as the ITL target."""
    fast = Machine(0.01, 0.0004, 0.001)
    assert flooded("wfq", fast, flood=True).p95("chat") - flooded("wfq", fast, flood=False).p95("chat") < 0.15


def test_beams_are_charged_for_all_that_they_compute() -> None:
    run = new_run(scheduling_policy="wfq")
    plain = dataclasses.replace(request("a", 20, 10), sampling=SamplingParams())
    run.add(
        dataclasses.replace(plain, tenant="greedy"),
        dataclasses.replace(plain, request_id="b", tenant="beams", beam=BeamParams(width=3)),
    )
    run.to_end()
    output = {each.tenant: each.total_output_tokens for each in run.scheduler.stats().tenants}
    assert output["greedy"] == 10
    assert output["beams"] >= 3 * 9


def test_a_quota_of_running_sequences_holds_and_delays_nobody_else() -> None:
    greedy = [Arrival(at=0.0, tenant="a", prompt=40, output=60, max_running=2) for _ in range(30)]
    other = [Arrival(at=0.0, tenant="b", prompt=40, output=60) for _ in range(10)]
    history = simulate(config("fcfs"), [*greedy, *other], machine=A10G)
    assert history.finished == {"a": 30, "b": 10}
    assert max(history.ttft["b"]) < 0.5
    assert sorted(history.ttft["a"])[5] > 2.0  # two at a time: the sixth waits for two whole outputs
