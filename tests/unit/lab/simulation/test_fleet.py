"""Fleets on paper: what each policy reaches on shared prefixes, failures, the coarse level beside the step level."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.contract.roles import CHUNK_FOR_OTHERS, FEWEST_CHUNKS
from quire_engine.cost_model import CostModel
from quire_engine.ranks import num_exchanges
from quire_lab.simulation.coarse import Fit, fitted, simulate_coarsely
from quire_lab.simulation.fleet import Fleet, FleetOutcome, copies, pooled_hits, simulate_steps
from quire_lab.simulation.fleet_report import FleetReport, fleet_report, pairs_in_order, plan_fleet, ttft_svg
from quire_lab.simulation.roles_plan import plan_roles
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate
from quire_lab.simulation.slo import Slo, parse_slo

COST = CostModel(
    step=0.012,
    row=6e-5,
    context=2e-8,
    prompt=((1, 0.0125), (512, 0.048), (4096, 0.345)),
    chunk_context=2.5e-10,
    request=0.002,
)
LIMITS = SchedulerLimits(
    block_size=512, max_num_seqs=64, max_num_batched_tokens=4096, prefill_chunk=4096, itl_target=0.0
)
SETUP = Setup(
    scheduler=SchedulerConfig(num_blocks=130, max_model_len=32_768, limits=LIMITS),
    cost=COST,
    max_num_queued_reqs=10_000,
)
FLEET = Fleet(replica=SETUP, replicas=4)
ROUTES = ("predicted_ttft", "cache_aware", "least_requests", "round_robin")


@cache
def load(count: int = 200, rate: float = 7.0, sessions: int = 40) -> tuple[TraceRow, ...]:
    """Prompts of 1.5 to 10 thousand tokens, that begin with a common block and one of their session's chain."""
    rng, at, rows = random.Random(1), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        session, depth = rng.randrange(sessions), rng.randrange(3, 20)
        blocks = (1, *[session * 1000 + number for number in range(depth - 1)])
        rows.append(
            TraceRow(
                at=at,
                input_tokens=depth * 512 + rng.randrange(512),
                output_tokens=rng.randrange(20, 120),
                blocks=blocks,
                block_tokens=512,
            )
        )
    return tuple(rows)


@cache
def run(fleet_route: str, level: str, **more: object) -> tuple[FleetOutcome, FleetReport]:
    fleet = replace(FLEET, route=fleet_route, **more)  # type: ignore[arg-type]
    found = simulate_steps(fleet, load()) if level == "step" else simulate_coarsely(fleet, load(), fit=Fit())
    return found, fleet_report(fleet, found)


def test_the_replicas_that_are_wanted_follow_the_load_and_its_first_tokens() -> None:
    """As a front's metrics would have told: by work whatever the fleet's size, and one more where it is late."""

    def wanted(replicas: int, speed: float = 1.0, ttft_target: float = 0.0) -> tuple[int, float]:
        fleet = replace(FLEET, replicas=replicas, ttft_target=ttft_target)
        found = fleet_report(fleet, simulate_coarsely(fleet, load(1000), fit=Fit(), speed=speed))
        return found.wanted, found.wanted_mean

    few, many, busier = wanted(6), wanted(8), wanted(8, speed=2.0)
    assert few[0] == pytest.approx(many[0], rel=0.3)  # fuller replicas share their steps among more
    assert 0 < few[1] <= few[0]
    assert busier[0] > 1.4 * many[0]
    assert wanted(4, speed=0.2)[0] < 4
    assert wanted(4, speed=0.2, ttft_target=0.01)[0] == 5


@pytest.mark.parametrize("level", ["step", "coarse"])
def test_predicted_ttft_finds_what_is_cached(level: str) -> None:
    ours, turns = run("predicted_ttft", level)[1], run("round_robin", level)[1]
    assert ours.hits > 1.5 * turns.hits
    assert (ours.report.ttft.p95 or 0) < 0.6 * (turns.report.ttft.p95 or 0)
    assert ours.report.served == len(load())
    assert ours.load < 1.6
    assert ours.error_p50 is not None
    assert 0.75 < ours.error_p50 < 1.25


def test_a_fleet_of_one_is_one_server() -> None:
    fleet = replace(FLEET, replicas=1, route="round_robin")
    rows = load()[:120]
    found, alone = simulate_steps(fleet, rows).outcome, simulate(SETUP, rows)
    assert [(one.first_at, one.last_at, one.cached_tokens) for one in found.requests] == [
        (one.first_at, one.last_at, one.cached_tokens) for one in alone.requests
    ]
    assert sorted(found.gaps) == sorted(alone.gaps)
    assert (found.steps, found.seconds) == (alone.steps, alone.seconds)


@pytest.mark.parametrize("level", ["step", "coarse"])
def test_equal_fleets_have_equal_outcomes(level: str) -> None:
    rows = load()[:80]
    first, second = [
        simulate_steps(FLEET, rows) if level == "step" else simulate_coarsely(FLEET, rows, fit=Fit()) for _ in range(2)
    ]
    assert first.chosen == second.chosen
    assert [one.first_at for one in first.outcome.requests] == [one.first_at for one in second.outcome.requests]


def test_coarse_has_the_order_of_step() -> None:
    step, coarse = ([run(route, level)[1] for route in ROUTES] for level in ("step", "coarse"))
    values = [
        (
            [one.hits for one in each],
            [one.report.ttft.p95 or 0.0 for one in each],
            [one.report.ttft.p50 or 0.0 for one in each],
        )
        for each in (step, coarse)
    ]
    same = total = 0
    for mine, other in zip(*values, strict=True):
        found, pairs = pairs_in_order(mine, other, apart=0.1)
        same, total = same + found, total + pairs
    assert total >= 9
    assert same >= 0.9 * total
    for one, other in zip(step, coarse, strict=True):
        assert abs(other.hits - one.hits) < 0.06


def test_the_fit_makes_coarse_nearer() -> None:
    found = fitted(FLEET, load(600), requests=300)
    assert 0.95 < found.hits < 1.05
    assert 0.85 < found.p95 < 1.15
    assert 0.9 < found.p50 < 1.1


def test_the_fit_of_many_replicas_has_requests() -> None:
    """A part of a fiftieth, of a load whose tenants all begin with one prompt each."""
    users = copies(load(), 10)
    found = fitted(replace(FLEET, replicas=100), users, requests=60)
    assert found.requests > 0.3 * len(users) / 50


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("level", ["step", "coarse"])
def test_a_lost_replica_costs_time_and_no_request(level: str) -> None:
    whole = run("predicted_ttft", level)[1]
    found, report = run("predicted_ttft", level, lose_at=(20.0,))
    assert found.moved > 0
    assert report.report.served == len(load())
    assert all(one.num_tokens == one.row.output_tokens for one in found.outcome.requests)
    assert (report.report.ttft.p95 or 0) >= (whole.report.ttft.p95 or 0)
    late = [number for number, row in enumerate(load()) if row.at > 22.5]
    assert late
    assert 0 not in found.chosen[-len(late) // 2 :]


def test_a_slow_replica_gets_less_and_the_fleet_degrades_only_a_little() -> None:
    found, report = run("predicted_ttft", "step", slow=3.0)
    turns = run("round_robin", "step", slow=3.0)[1]
    assert found.counts[3] < 0.75 * sum(found.counts[:3]) / 3
    assert (report.report.ttft.p95 or 0) < 0.5 * (turns.report.ttft.p95 or 0)


@pytest.mark.parametrize(
    "wrong", [{"stale": 5.0}, {"wrong_cost": 1.3}, pytest.param({"wrong_cost": 0.7}, marks=pytest.mark.matrix)]
)
def test_a_stale_index_and_a_wrong_cost_degrade_and_do_not_oscillate(wrong: dict[str, float]) -> None:
    true = run("predicted_ttft", "step")[1]
    found, report = run("predicted_ttft", "step", **wrong)
    assert report.hits > 0.7 * true.hits
    assert report.hits > 1.3 * run("round_robin", "step")[1].hits
    assert (report.report.ttft.p95 or 0) < 2 * (true.report.ttft.p95 or 0)
    for begin in range(0, len(found.chosen) - 40, 20):  # herds would send all of a few seconds to one replica
        assert max(Counter(found.chosen[begin : begin + 40]).values()) <= 28


def test_fleets_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="one must be left"):
        simulate_steps(replace(FLEET, replicas=1, lose_at=(1.0,)), load()[:5])
    with pytest.raises(ConfigError, match="at most 16"):
        simulate_steps(replace(FLEET, replicas=17), load()[:5])


# ---------------------------------------------------------------- reports and plans


def test_a_plan_is_the_fewest_replicas_that_suffice() -> None:
    slo = parse_slo("ttft_p95=1s")
    plans = plan_fleet(FLEET, load(), slo, ["round_robin", "predicted_ttft"], fit=Fit())
    assert [plan.route for plan in plans] == ["predicted_ttft", "round_robin"]
    best = plans[0]
    assert best.at is not None
    assert not best.at.report.misses
    assert best.one_less is not None
    assert best.one_less.report.misses
    assert best.low <= best.replicas <= best.high
    with pytest.raises(ConfigError, match="needs objectives"):
        plan_fleet(FLEET, load(), Slo(), ["round_robin"], fit=Fit())


def test_copies_are_other_users() -> None:
    rows = copies(load()[:50], 3)
    assert len(rows) == 150
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert {row.tenant for row in rows} == {"copy-0", "copy-1", "copy-2"}
    assert pooled_hits(rows, 10**9) == pytest.approx(pooled_hits(load()[:50], 10**9), rel=0.05)
    found = simulate_coarsely(FLEET, rows, fit=Fit())
    jain = fleet_report(FLEET, found).report.jain
    assert jain is not None
    assert jain > 0.95


def test_a_pooled_cache_is_an_upper_bound() -> None:
    pooled = pooled_hits(load(), 4 * 130 * 512)
    assert pooled > run("predicted_ttft", "step")[1].hits > 0.6 * pooled


def test_pairs_that_are_near_have_no_order() -> None:
    assert pairs_in_order([1.0, 1.01, 2.0], [3.0, 2.0, 4.0]) == (2, 2)
    assert pairs_in_order([1.0, 2.0], [2.0, 1.0]) == (0, 1)


def test_the_picture_names_every_policy() -> None:
    text = ttft_svg([(route, run(route, "coarse")[0]) for route in ROUTES], "a & b")
    assert text.startswith("<svg")
    assert "a &amp; b" in text
    assert all(f">{route}</text>" in text for route in ROUTES)
    assert text.count("<polyline") == len(ROUTES)


ROLES = Setup(
    scheduler=SchedulerConfig(
        num_blocks=6000,
        max_model_len=32_768,
        limits=SchedulerLimits(
            block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, prefill_chunk=2048, itl_target=0.0
        ),
    ),
    cost=CostModel(step=0.012, row=6e-5, context=2e-8, prompt=((1, 0.0125), (512, 0.5), (4096, 4.0)), request=0.002),
    max_num_queued_reqs=10_000,
)


@cache
def chats(rate: float, count: int = 60) -> tuple[TraceRow, ...]:
    """Prompts of 200 to 2,400 tokens of their own."""
    rng, at, rows = random.Random(2), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        rows.append(TraceRow(at=at, input_tokens=rng.randrange(200, 2400), output_tokens=rng.randrange(30, 90)))
    return tuple(rows)


def with_roles(rows: tuple[TraceRow, ...], **changes: object) -> FleetReport:
    fleet = replace(FLEET, replica=ROLES, **{"replicas": 2, **changes})  # type: ignore[arg-type]
    return fleet_report(fleet, simulate_steps(fleet, rows))


def test_a_replica_for_prompts_keeps_others_smooth_and_is_late_by_a_bounded_time() -> None:
    """Its time to first token is near that of one replica by itself, whatever the wire, and gaps of tokens shrink."""
    rows = chats(0.2)[:10]
    alone = with_roles(rows, replicas=1)
    for token_seconds in (0.0, 1e-4, 1e-3, 0.1):
        apart = with_roles(rows, for_prompts=1, token_seconds=token_seconds)
        assert 4 < apart.passed_on <= sum(row.input_tokens >= FEWEST_CHUNKS * CHUNK_FOR_OTHERS for row in rows)
        assert apart.report.served == alone.report.served == 10
        assert (apart.late == apart.passed_on) == (token_seconds == 0.1)
        for statistic, most in (("p50", 1.2), ("max", 1.3)):  # others wait too for one that has waited in vain
            mine, other = (one.report.value("ttft", statistic) or 0.0 for one in (apart, alone))
            assert 0 < mine <= most * other + 0.1
        assert apart.report.computed_tokens > alone.report.computed_tokens, "a prompt's last block is computed by both"
    busy = chats(0.6)
    alike, apart = with_roles(busy), with_roles(busy, for_prompts=1, token_seconds=1e-4)
    assert (apart.report.value("itl", "mean") or 1.0) < 0.95 * (alike.report.value("itl", "mean") or 0.0)


def test_roles_pay_only_where_they_are_clearly_better() -> None:
    fleet = replace(FLEET, replica=ROLES, replicas=2, token_seconds=1e-4)
    rows = chats(0.3)
    smooth = plan_roles(fleet, rows, parse_slo("ttft_p95=8s,itl_p99=60ms"))
    assert {(way.replicas, way.for_prompts) for way in smooth.ways} == {(2, 0), (2, 1)}
    assert {way.itl_target for way in smooth.ways if not way.for_prompts} == {0.0, 0.06}
    quick = plan_roles(fleet, rows, parse_slo("ttft_p95=1s"))
    assert not quick.pays, "for the first token alone both nodes compute prompts"
    assert quick.without.strain < quick.roles.strain
    for replicas, strain, pays in ((2, 0.8, True), (2, 0.88, False), (1, 1.0, True), (1, 1.1, False)):
        way = replace(smooth.roles, replicas=replicas, strain=strain)
        assert replace(smooth, without=replace(smooth.without, strain=0.9), roles=way).pays == pays
    with pytest.raises(ConfigError, match="roles need two nodes"):
        plan_roles(replace(fleet, replicas=1), rows, parse_slo("ttft_p95=1s"))


def test_a_fleet_with_roles_is_checked() -> None:
    with pytest.raises(ConfigError, match="2 of 2 replicas are for prompts"):
        replace(FLEET, replicas=2, for_prompts=2).check()
    with pytest.raises(ConfigError, match="none is lost or slow"):
        replace(FLEET, replicas=2, for_prompts=1, slow=2.0).check()
    with pytest.raises(ConfigError, match="step by step"):
        simulate_coarsely(replace(FLEET, replicas=2, for_prompts=1), chats(0.2), fit=Fit())


def test_ranks_divide_a_step_and_add_their_exchanges() -> None:
    two = SETUP.of_ranks(2, num_exchanges(28), 2e-6, pools=True)
    assert two.cost.decode_seconds(4, 1000) == pytest.approx(COST.decode_seconds(4, 1000) / 2 + 113 * 2e-6)
    assert two.cost.prompt_seconds(512) == pytest.approx(0.024 + 113 * 2e-6)
    assert two.scheduler.num_blocks == 2 * SETUP.scheduler.num_blocks
    assert SETUP.of_ranks(1, 113, 2e-6) == SETUP
