"""Tenants' service over replicas, and the number of replicas wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import TenantStats
from quire_engine.cost_model import CostModel
from quire_engine.routing.fleet import TenantService, WantedReplicas, request_seconds, wanted_together
from quire_engine.routing.views import ReplicaView

COST = CostModel(step=0.01, row=1e-4, prompt=((1, 0.011), (512, 0.06)))
VIEW = ReplicaView(name="a", cohort="", state="ready", cost=COST, limits=SchedulerLimits())


def stats(**service: float) -> list[TenantStats]:
    return [TenantStats(tenant=name, total_service=value) for name, value in service.items()]


def test_service_elsewhere_is_that_of_all_others() -> None:
    service = TenantService()
    service.observe("a", stats(x=100.0, y=5.0))
    service.observe("b", stats(x=30.0))
    assert (service.elsewhere("a", "x"), service.elsewhere("a", "y")) == (30.0, 0.0)
    assert service.elsewhere("b", "x") == 100.0
    assert service.elsewhere("c", "x") == 130.0


def test_an_engine_that_restarts_or_is_lost_has_given_what_it_gave() -> None:
    service = TenantService()
    service.observe("a", stats(x=100.0))
    service.observe("a", stats(x=10.0))  # a new engine
    assert service.elsewhere("b", "x") == 110.0
    assert service.elsewhere("a", "x") == 100.0
    service.remove("a")
    assert service.elsewhere("b", "x") == 110.0


def test_wanted_follows_the_offered_work() -> None:
    wanted, now = WantedReplicas(), 0.0
    for _ in range(120):
        wanted.offer(busy_seconds=1.5, predicted_ttft=0.1, now=now)
        now += 1.0
    assert wanted.wanted(now, ready=1).count == 2
    for _ in range(120):
        wanted.offer(busy_seconds=3.1, predicted_ttft=0.1, now=now)
        now += 1.0
    assert wanted.wanted(now, ready=2).count == 5


def test_up_at_once_when_late_for_ten_seconds_and_down_after_five_minutes() -> None:
    wanted, now = WantedReplicas(ttft_target=1.0), 0.0
    seen = []
    for _ in range(30):
        wanted.offer(busy_seconds=0.1, predicted_ttft=2.0, now=now)
        seen.append(wanted.wanted(now, ready=2).count)
        now += 1.0
    assert seen[5] == 1
    assert seen[12] == 3
    for _ in range(299):
        wanted.offer(busy_seconds=0.1, predicted_ttft=0.2, now=now)
        assert wanted.wanted(now, ready=3).count >= 3
        now += 1.0
    assert wanted.wanted(now + 20, ready=3).count == 1


def test_fronts_that_share_replicas_want_no_more_than_one_front_would() -> None:
    """A third of the work each is rounded up once, and each one's late first tokens ask for the same replica."""
    one, fronts = WantedReplicas(ttft_target=1.0, least=0), [WantedReplicas(ttft_target=1.0, least=0) for _ in range(3)]
    for second in range(90):
        for front in fronts:
            front.offer(busy_seconds=0.5, predicted_ttft=2.0 * (second < 40), now=float(second))
            one.offer(busy_seconds=0.5, predicted_ttft=2.0 * (second < 40), now=float(second))
        each = [front.wanted(float(second), ready=4) for front in fronts]
        alone = one.wanted(float(second), ready=4)
        assert wanted_together(each) == alone.count
    assert alone.count == 5
    assert sum(wanted.count for wanted in each) == 15
    assert sum(wanted.work for wanted in each) == pytest.approx(alone.work)


def test_a_request_costs_its_prompt_and_its_part_of_the_steps() -> None:
    busy = replace(VIEW, decodes=32, context=3_000)
    alone, shared = (request_seconds(view, prompt_tokens=0, output_tokens=100) for view in (VIEW, busy))
    assert alone > 10 * shared
    assert request_seconds(VIEW, prompt_tokens=5_120, output_tokens=0) > 9 * COST.prompt_seconds(512)
