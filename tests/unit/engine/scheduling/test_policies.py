"""Each decision of the scheduler by itself."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.contract.errors import InfeasibleRequest
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits, VictimName
from quire_engine.contract.types import GenerationRequest, ServiceClass
from quire_engine.scheduling.blocks import PageTable, SequenceKV
from quire_engine.scheduling.forecast import has_room
from quire_engine.scheduling.gate import check_request
from quire_engine.scheduling.policies import (
    FEWEST,
    VICTIMS,
    ElderRule,
    FixedChunk,
    ItlTarget,
    LeastLost,
    LongestRunning,
    LowestClass,
    PriorityOrder,
    VictimPolicy,
    Youngest,
    policies_for,
)
from quire_engine.scheduling.sequence import Group, Sequence
from support.fake_executor import request

CONFIG = SchedulerConfig(num_blocks=60, max_model_len=4096)


def group(
    arrival: int, *, added: int = 0, work: int = 1, priority: int = 0, service_class: ServiceClass = "interactive"
) -> Group:
    wanted = dataclasses.replace(request(str(arrival), priority=priority), service_class=service_class)
    one = Group(request=wanted, arrival=arrival, added_step=added, work=work)
    tokens = list(wanted.prompt_token_ids)
    one.add_choice(
        Sequence(
            sequence_id=arrival,
            choice=0,
            group=one,
            own_token_ids=tokens,
            num_prompt_tokens=len(tokens),
            kv=SequenceKV(tables=(PageTable(4),)),
        )
    )
    return one


def test_orders() -> None:
    first, second, urgent = group(0), group(1), group(2, priority=-1)
    fcfs = policies_for(CONFIG.limits).order
    assert sorted([urgent, second, first], key=fcfs.key) == [first, second, urgent]
    assert sorted([second, first, urgent], key=PriorityOrder().key) == [urgent, first, second]
    by_priority = policies_for(SchedulerLimits(scheduling_policy="priority")).order
    batch = group(3, priority=-2, service_class="batch")
    assert sorted([batch, second, first, urgent], key=by_priority.key) == [urgent, first, second, batch]


def test_the_youngest_is_the_victim_and_never_the_elder() -> None:
    a, b, c = group(0), group(1), group(2)
    assert Youngest().choose([a, b, c], a) is c
    assert Youngest().choose([a, b, c], c) is b
    assert Youngest().choose([a], a) is None


def candidates() -> list[Group]:
    """Groups that would lose least, that has run longest with a low priority, and of the lowest class."""
    a, b, c = group(0), group(1, priority=3), group(2, service_class="batch")
    for at, each in ((3.0, a), (1.0, b), (2.0, c)):
        each.enter(at)
    for each, computed in ((a, 2), (b, 6), (c, 4)):
        each.leader.kv.num_computed = computed
    return [a, b, c]


@pytest.mark.parametrize("name", VICTIMS)
def test_no_victim_is_the_elder(name: VictimName) -> None:
    policy, running = VICTIMS[name](), candidates()
    first = policy.choose(running, None)
    assert first is not None
    assert policy.choose(running, first) not in {None, first}
    assert policy.choose([first], first) is None


def test_other_victims() -> None:
    a, b, c = candidates()
    choices: list[tuple[VictimPolicy, list[Group]]] = [
        (LongestRunning(), [b, c, a]),
        (LowestClass(), [c, b, a]),
        (LeastLost(), [c, b, a]),
    ]
    for policy, order in choices:
        first, second, _ = order
        assert policy.choose([a, b, c], None) is first
        assert policy.choose([a, b, c], first) is second


def test_the_least_is_lost_within_a_class_and_a_priority() -> None:
    groups = [group(0), group(1), group(2)]
    for each, computed in zip(groups, (6, 2, 2), strict=True):
        each.leader.kv.num_computed = computed
    assert LeastLost().choose(groups, None) is groups[2]
    assert LeastLost().choose(groups, groups[2]) is groups[1]
    assert LeastLost().choose([*groups, group(3, service_class="batch")], None).is_batch


def test_a_preempted_group_needs_one_block_more() -> None:
    one = group(0)
    assert has_room(one, need=5, available=5)
    one.enter(1.0)
    one.preempt()
    assert not has_room(one, need=5, available=5)
    assert has_room(one, need=5, available=6)


@pytest.mark.parametrize(
    ("pending", "planned", "budget", "size"), [(500, 0, 512, 256), (500, 16, 512, 240), (9, 0, 512, 9), (500, 0, 7, 7)]
)
def test_fixed_chunk(pending: int, planned: int, budget: int, size: int) -> None:
    assert FixedChunk(256).size(pending=pending, planned=planned, budget=budget, others=False) == size


@pytest.mark.parametrize(("pending", "size"), [(1025, 256), (1024, 512), (513, 512), (12, 12)])
def test_a_long_prompt_leaves_half_a_step(pending: int, size: int) -> None:
    assert FixedChunk(512).size(pending=pending, planned=0, budget=512, others=True) == size


def step_seconds(num_tokens: int) -> float:
    return 0.02 + 0.001 * num_tokens


def test_prompts_beside_decodes_fill_the_itl_target() -> None:
    policy = ItlTarget(0.2)
    assert policy.prompt_tokens(8) >= 512, "nothing is known yet"
    taken = []
    for _ in range(20):
        size = min(policy.prompt_tokens(8), 512)
        taken.append(step_seconds(size + 8))
        policy.learn(prompt_tokens=size, num_decodes=8, seconds=taken[-1])
    assert taken[0] > 0.5
    assert max(taken[1:]) < 0.22
    assert taken[-1] == pytest.approx(0.2, rel=0.02)
    assert policy.prompt_tokens(0) >= 512, "nobody waits for a token"


def test_the_itl_target_leaves_prompts_a_chunk() -> None:
    policy = ItlTarget(0.001)
    policy.learn(prompt_tokens=100, num_decodes=0, seconds=1.0)
    assert policy.prompt_tokens(8) == FEWEST


def test_steps_of_hardly_a_prompt_do_not_count() -> None:
    policy = ItlTarget(0.1)
    policy.learn(prompt_tokens=200, num_decodes=0, seconds=0.1)
    policy.learn(prompt_tokens=3, num_decodes=1, seconds=5.0)
    assert policy.prompt_tokens(20) == 180


def test_an_itl_target_of_0_is_none() -> None:
    policy = ItlTarget(0.0)
    policy.learn(prompt_tokens=100, num_decodes=0, seconds=1.0)
    assert policy.prompt_tokens(8) >= 1 << 20


def test_the_elder_is_the_oldest() -> None:
    a, b = group(0, work=100), group(1, work=5)
    assert ElderRule(10).choose([a, b], step=1) is a
    assert ElderRule(10).choose([], step=92) is None


def test_an_overdue_group_goes_before_an_older_one_that_is_not() -> None:
    a, b, c = group(0, work=100), group(1, added=1, work=5), group(2, added=1, work=5)
    assert ElderRule(10).choose([a, b, c], step=17) is b
    assert ElderRule(10).choose([a, b, c], step=16) is a


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (request("r", 1000, 200), "needs 75 blocks, pool has 60; the prompt alone does not fit"),
        (request("r", 900, 200), "needs 69 blocks, pool has 60; largest max_tokens is 61"),
        (request("r", 961, 1), "needs 61 blocks, pool has 60; the prompt alone does not fit"),
        (request("r", 500, 4000), "needs 4500 tokens, the context has 4096; largest max_tokens is 461"),
        (request("r", 8, 8, n=17), "n is 17, must be 1 to 16"),
        (request("r", 8, 8, n=0), "n is 0"),
        (request("r", ()), "the prompt is empty"),
        (request("r", 8, -1), "max_tokens is -1"),
        (request("r", 8, 4, resumed=((1,), (2,))), "2 entries for 1 choices"),
        (request("r", 8, 4, resumed=((1, 2, 3, 4),)), "already has its 4 tokens"),
        (request("r", 8, 4, n=2, finished=(0, 1)), "every choice has already finished"),
    ],
)
def test_infeasible_requests_are_refused_with_what_would_do(wanted: GenerationRequest, words: str) -> None:
    with pytest.raises(InfeasibleRequest, match=words):
        check_request(CONFIG, wanted)
