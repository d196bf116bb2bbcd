"""Longest prefix first, alone and fair among clients."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter

import pytest

from quire_engine.contract.limits import SchedulerLimits
from quire_engine.scheduling.policies import MOST, DeficitLongestPrefix, LongestPrefix, policies_for
from quire_engine.scheduling.sequence import Group
from support.fake_executor import Run, new_run, own_tokens, request


def groups(count: int, *, salts: int = 1) -> list[Group]:
    return [Group(request=request(f"r{i}", 8, salt=str(i % salts)), arrival=i, added_step=0) for i in range(count)]


def test_the_settings_name_them() -> None:
    assert isinstance(policies_for(SchedulerLimits(scheduling_policy="lpm")).queue, LongestPrefix)
    fair = policies_for(SchedulerLimits(scheduling_policy="dlpm"))
    assert isinstance(fair.queue, DeficitLongestPrefix)
    assert fair.charge == fair.queue.charge
    assert policies_for(SchedulerLimits()).charge is None


def test_the_longest_prefix_goes_first_and_equal_ones_as_they_stand() -> None:
    waiting = groups(5)
    cached = dict(zip(waiting, [0, 32, 16, 32, 0], strict=True))
    assert [group.arrival for group in LongestPrefix().arrange(waiting, cached.__getitem__)] == [1, 3, 2, 0, 4]


@pytest.mark.parametrize("policy", [LongestPrefix(), DeficitLongestPrefix()])
@pytest.mark.parametrize("salts", [1, 3, 400])
def test_all_are_asked_once_and_few_looked_up(policy: LongestPrefix | DeficitLongestPrefix, salts: int) -> None:
    waiting, looked_up = groups(1000, salts=salts), 0

    def cached(group: Group) -> int:
        nonlocal looked_up
        looked_up += 1
        return group.arrival % 7

    order = list(policy.arrange(waiting, cached))
    assert Counter(group.arrival for group in order) == Counter(range(1000))
    assert looked_up <= MOST


@pytest.mark.parametrize("name", ["lpm", "dlpm"])
def test_a_thousand_who_wait_cost_a_step_little(name: str) -> None:
    """Not a timing of this machine: a thousand cost about what the first of them do."""

    def seconds(count: int) -> float:
        run = new_run(num_blocks=4096, scheduling_policy=name, max_num_seqs=1, check=False)
        run.add(*(request(f"r{i}", own_tokens(f"r{i}", 200), 50, salt=str(i % 8)) for i in range(count)))
        run.one_step()
        times = []
        for _ in range(9):
            started = time.thread_time()
            run.scheduler._planner.admission.num_cached_tokens(run.scheduler._roster.waiting[0])
            run.one_step()
            times.append(time.thread_time() - started)
        return min(times)

    assert seconds(1000) < 6 * seconds(200)


def test_lpm_serves_a_family_while_its_prefix_is_there() -> None:
    """The pool holds four of eight families: in turns nothing is found again; the elder alone still takes turns."""

    def computed(policy: str) -> int:
        run = new_run(num_blocks=60, max_num_seqs=4, scheduling_policy=policy, elder_age_steps=1000)
        families = [own_tokens(f"family{f}", 192) for f in range(8)]
        run.add(*(request(f"r{i}", (*families[i % 8], *own_tokens(f"m{i}", 20)), 2) for i in range(48)))
        run.to_end()
        return sum(batch.num_tokens - batch.num_decodes for batch in run.log)

    assert computed("fcfs") == 48 * 212
    assert max(computed("lpm"), computed("dlpm")) < 48 * 212 / 2


def service(policy: str, steps: int) -> tuple[Counter[str], int]:
    """Two clients that always wait: one whose prompts share a long prefix, one whose prompts share nothing.

    What was computed for each, output tokens twice, and the largest cost of one request.
    """
    run = new_run(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=256, scheduling_policy=policy, check=False)
    prefix, dice = own_tokens("prefix", 160), random.Random(0)
    served: Counter[str] = Counter()
    costs, sent = 0, 0
    while run.step < steps:
        roster = run.scheduler._roster
        for name in ("shares", "alone"):
            while sum(group.request.cache_salt == name for group in roster.waiting) < 20:
                sent += 1
                start = prefix if name == "shares" else own_tokens(f"a{sent}", 160)
                length = dice.randint(8, 40)
                run.add(request(f"r{sent}", (*start, *own_tokens(f"r{sent}", length)), 16, salt=name))
                costs = max(costs, 160 + length + 2 * 16)
        owner = {s.sequence_id: s.group.request.cache_salt for s in roster.sequences.values()}
        batch = run.one_step()
        assert batch is not None
        for item in batch.items:
            served[owner[item.sequence_id]] += item.num_tokens * (2 if item.is_decode else 1)
    return served, costs


@pytest.mark.matrix
def test_dlpm_serves_clients_alike_and_lpm_does_not() -> None:
    fair, cost = service("dlpm", 1200)
    gap = abs(fair["shares"] - fair["alone"])
    assert gap <= 2 * (2048 + cost) < min(fair.values()) / 5
    unfair, _ = service("lpm", 1200)
    assert unfair["shares"] > 2 * unfair["alone"]


def test_dlpm_goes_by_prefix_within_a_quantum() -> None:
    policy = DeficitLongestPrefix(quantum=100)
    waiting = groups(6, salts=2)
    cached = dict(zip(waiting, [0, 1, 4, 1, 0, 6], strict=True))
    order = []
    for group in policy.arrange(waiting, cached.__getitem__):
        group.state = "running"
        order.append(group.arrival)
    assert order == [5, 2, 1, 3, 0, 4]
    strict = DeficitLongestPrefix(quantum=4)
    for group in waiting:
        group.state = "waiting"
    served = []
    for group in strict.arrange(waiting, cached.__getitem__):
        group.state = "running"
        served.append(group.request.cache_salt)
    assert served[:2] == ["1", "0"]
    assert served != ["1", "0", "1", "1", "0", "0"]


def test_a_client_that_is_blocked_gives_nobody_more() -> None:
    policy = DeficitLongestPrefix(quantum=10)
    waiting = groups(2, salts=2)
    list(policy.arrange(waiting, lambda _: 0))  # nobody finds room
    before = dict(policy._left)
    for _ in range(50):
        list(policy.arrange(waiting, lambda _: 0))
    assert policy._left == before


def test_the_counters_of_clients_that_left_do_not_pile_up() -> None:
    policy = DeficitLongestPrefix()
    for i in range(3000):
        gone = Group(request=request("r", 8, salt=str(i)), arrival=i, added_step=0)
        list(policy.arrange([gone], lambda _: 0))
    assert len(policy._left) < 1100


def test_charges_are_for_prompts_once_and_for_outputs_twice() -> None:
    run: Run = new_run(scheduling_policy="dlpm", max_num_seqs=1)
    run.add(request("a", 20, 4, salt="x"), request("b", 20, 4, salt="y"))
    queue = run.scheduler._planner._policies.queue
    assert isinstance(queue, DeficitLongestPrefix)
    run.one_step()
    start = queue._left["", "x"]
    run.one_step()
    assert queue._left["", "x"] == start - 2
    assert queue._left["", "y"] == 2048


def test_a_salt_that_is_called_as_a_tenant_is_another_client() -> None:
    run: Run = new_run(scheduling_policy="dlpm", max_num_seqs=1)
    run.add(dataclasses.replace(request("a", 20, 4), tenant="x"), request("b", 20, 4, salt="x"))
    queue = run.scheduler._planner._policies.queue
    assert isinstance(queue, DeficitLongestPrefix)
    run.one_step()
    assert set(queue._left) == {("x", ""), ("", "x")}
