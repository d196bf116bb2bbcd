"""Route policies: what each prefers, how ties are broken, and who may not be chosen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import PrefixChanges
from quire_engine.cost_model import CostModel
from quire_engine.routing.index import PrefixIndex
from quire_engine.routing.policy import RoutePolicyName, route_policy
from quire_engine.routing.views import NoReplica, ReplicaView, RouteRequest

COST = CostModel(step=0.01, row=1e-4, context=1e-8, prompt=((1, 0.011), (512, 0.05), (2048, 0.18)))
LIMITS = SchedulerLimits(block_size=16, max_num_batched_tokens=2048, prefill_chunk=2048, itl_target=0.0)
IDLE = ReplicaView(name="", cohort="one", state="ready", cost=COST, limits=LIMITS, blocks_total=4096, blocks_free=4096)
BLOCKS = tuple(range(1, 65))
NAMES = get_args(RoutePolicyName)


def fleet(count: int, **of_first: object) -> list[ReplicaView]:
    views = [replace(IDLE, name=f"r{number}") for number in range(count)]
    views[0] = replace(views[0], **of_first)  # type: ignore[arg-type]
    return views


def index(**depths: int) -> PrefixIndex:
    found = PrefixIndex()
    for number in range(4):
        found.add(f"r{number}")
    for name, depth in depths.items():
        blocks = BLOCKS[:depth]
        assert found.apply(name, PrefixChanges(number=1, registered=blocks, depths=tuple(range(depth))))
    return found


def request(**more: object) -> RouteRequest:
    return RouteRequest(request_id="a", prompt_tokens=1024, blocks=BLOCKS, **more)  # type: ignore[arg-type]


def test_predicted_ttft_takes_a_cached_prefix_from_a_replica_that_is_little_busier() -> None:
    views = fleet(4, prompt_tokens_ahead=200)
    route = route_policy("predicted_ttft").choose(request(), views, index(r0=60), 0.0)
    assert (route.name, route.hit_blocks) == ("r0", 60)
    assert "960 tokens cached" in route.why
    assert "200 ahead" in route.why


def test_predicted_ttft_leaves_a_cached_prefix_whose_replica_is_much_busier() -> None:
    views = fleet(4, prompt_tokens_ahead=20_000)
    route = route_policy("predicted_ttft").choose(request(), views, index(r0=60), 0.0)
    assert route.name != "r0"
    assert route.hit_blocks == 0


def test_own_work_counts_once_more() -> None:
    """A replica that is as late by its queue as the others by the prompt is better: it takes less from those after."""
    late = 1.3 * (COST.prompt_seconds(1024) - COST.prompt_seconds(64))
    views = fleet(2, step_ends_in=late)
    route = route_policy("predicted_ttft").choose(request(), views, index(r0=60), 0.0)
    assert route.name == "r0"


def test_a_session_breaks_ties_and_nothing_else() -> None:
    policy, views, nobody = route_policy("predicted_ttft"), fleet(4), index()
    first = policy.choose(request(session="s"), views, nobody, 0.0).name
    busier = [replace(view, context=100 if view.name == first else 0) for view in views]
    assert policy.choose(request(session="s"), busier, nobody, 0.0).name == first
    assert policy.choose(request(session="other"), busier, nobody, 0.0).name != first
    much = [replace(view, prompt_tokens_ahead=5_000 if view.name == first else 0) for view in views]
    assert policy.choose(request(session="s"), much, nobody, 0.0).name != first


def test_sent_blocks_keep_a_burst_of_one_prompt_together() -> None:
    policy, views, known = route_policy("predicted_ttft"), fleet(4), index()
    names = []
    for number in range(3):
        route = policy.choose(replace(request(), request_id=str(number)), views, known, 0.0)
        known.sent(route.name, str(number), BLOCKS)
        own = 1024 - 16 * route.hit_blocks
        views = [
            replace(view, prompt_tokens_ahead=view.prompt_tokens_ahead + max(own, 1))
            if view.name == route.name
            else view
            for view in views
        ]
        names.append(route.name)
    assert len(set(names)) == 1 or names[0] == names[1]


def test_round_robin_takes_turns() -> None:
    policy = route_policy("round_robin")
    names = Counter(policy.choose(request(), fleet(4), index(), 0.0).name for _ in range(8))
    assert set(names.values()) == {2}


def test_least_tokens_counts_tokens() -> None:
    views = fleet(2, prompt_tokens_ahead=5_000, requests=1)
    views[1] = replace(views[1], prompt_tokens_ahead=100, requests=50)
    assert route_policy("least_tokens").choose(request(), views, index(r0=60), 0.0).name == "r1"


def test_least_requests_counts_requests() -> None:
    views = fleet(2, prompt_tokens_ahead=5_000, requests=1)
    views[1] = replace(views[1], prompt_tokens_ahead=100, requests=50)
    assert route_policy("least_requests").choose(request(), views, index(r1=60), 0.0).name == "r0"


def test_an_empty_replica_is_filled_before_others_evict() -> None:
    """The common first block alone is no reason to displace what the others have cached."""
    full = [replace(IDLE, name=f"r{number}", blocks_blank=0) for number in range(3)]
    views = [*full, replace(IDLE, name="r3", blocks_blank=4096)]
    route = route_policy("predicted_ttft").choose(request(), views, index(r0=4, r1=4, r2=4), 0.0)
    assert route.name == "r3"


def test_cache_aware_is_the_published_rule() -> None:
    policy = route_policy("cache_aware")
    assert policy.choose(request(), fleet(2, requests=50), index(r0=40), 0.0).name == "r0"  # a match of 0.6
    assert policy.choose(request(), fleet(2, requests=100), index(r0=40), 0.0).name == "r1"  # loads differ
    assert route_policy("cache_aware").choose(request(), fleet(2, requests=3), index(r0=10), 0.0).name == "r1"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "round_robin"])
def test_ties_are_broken_by_load(name: str) -> None:
    views = fleet(3, requests=7)
    views[1] = replace(views[1], requests=3)
    views[2] = replace(views[2], requests=5)
    assert route_policy(name).choose(request(), views, index(), 0.0).name == "r1"


@pytest.mark.parametrize("name", NAMES)
def test_who_may_not_be_chosen(name: str) -> None:
    policy = route_policy(name)
    views = fleet(4)
    views[0] = replace(views[0], state="draining")
    views[1] = replace(views[1], state="silent")
    views[2] = replace(views[2], cohort="two")
    for _ in range(4):
        assert policy.choose(request(cohort="one"), views, index(r0=60), 0.0).name == "r3"
    with pytest.raises(NoReplica, match="cohort one"):
        policy.choose(request(cohort="one", excluded=frozenset(["r3"])), views, index(), 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_that_became_very_slow_gets_nothing_while_others_may(name: str) -> None:
    policy, views = route_policy(name), fleet(2, slowness=6.0)
    assert {policy.choose(request(), views, index(r0=64), 0.0).name for _ in range(4)} == {"r1"}
    alone = [views[0]]
    assert policy.choose(request(), alone, index(), 0.0).name == "r0"


def test_a_stronger_kind_is_chosen_though_as_many_tokens_are_ahead() -> None:
    fast = replace(COST, step=0.001, prompt=tuple((tokens, seconds / 10) for tokens, seconds in COST.prompt))
    views = fleet(4, prompt_tokens_ahead=3_000, cost=fast)
    views[1:] = [replace(view, prompt_tokens_ahead=2_000) for view in views[1:]]
    assert route_policy("predicted_ttft").choose(request(), views, index(), 0.0).name == "r0"


def test_few_are_scored_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that all replicas have must not cost a prediction for each."""
    scored = []
    known = PrefixIndex()
    views = []
    for number in range(100):
        name = f"x{number}"
        known.add(name)
        known.apply(
            name, PrefixChanges(number=1, registered=BLOCKS[: 1 + number % 60], depths=tuple(range(1 + number % 60)))
        )
        views.append(replace(IDLE, name=name, prompt_tokens_ahead=number * 37 % 1000))
    import quire_engine.routing.policy as module

    predict = module.predicted_ttft
    monkeypatch.setattr(module, "predicted_ttft", lambda view, *rest: scored.append(view.name) or predict(view, *rest))
    chosen = route_policy("predicted_ttft").choose(request(), views, known, 0.0)
    assert len(scored) <= 17
    best = min(views, key=lambda view: sum(predict(view, request(), known.depths(BLOCKS).get(view.name, 0))))
    found = next(view for view in views if view.name == chosen.name)
    least = sum(predict(best, request(), known.depths(BLOCKS)[best.name]))
    assert sum(predict(found, request(), chosen.hit_blocks)) <= 1.05 * least + 1e-9


def test_many_kinds_of_replicas_are_compared_too() -> None:
    views = [
        replace(IDLE, name=f"x{number}", cost=replace(COST, step=0.01), limits=replace(LIMITS), requests=number)
        for number in range(40)
    ]
    assert route_policy("predicted_ttft").choose(request(), views, index(), 0.0).name == "x0"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'sticky' is unknown; use predicted_ttft, round_robin"):
        route_policy("sticky")
