"""`quire simulate --replicas` and `quire plan --fleet`: policies of a fleet beside each other, and how many replicas.

Promises: the level and the fit of every table are said beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError
from quire_engine.cost_model import seconds
from quire_engine.routing.policy import RoutePolicyName, route_policy
from quire_lab.simulation.coarse import Fit, Fitted, fitted, simulate_coarsely
from quire_lab.simulation.fleet import (
    MOST_STEP_REPLICAS,
    Fleet,
    FleetOutcome,
    copies,
    pooled_hits,
    simulate_steps,
)
from quire_lab.simulation.fleet_report import (
    FleetPlan,
    FleetReport,
    fleet_report,
    pairs_in_order,
    plan_fleet,
    ttft_svg,
)
from quire_lab.simulation.roles_plan import RolesPlan, Way, plan_roles
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.slo import Slo
from quire_server.showing.terminal import DONE, FAILED, above_0, duration, whole_number

_HOURS = 3600.0


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a fleet, which both commands share."""
    what = parser.add_argument_group("Fleet")
    what.add_argument(
        "--route",
        default="predicted_ttft",
        metavar="NAME,...",
        help=f"policies: {', '.join(get_args(RoutePolicyName))} [predicted_ttft]",
    )
    what.add_argument("--copies", type=whole_number, default=1, metavar="N", help="of a trace's users [1]")
    what.add_argument("--lose-replica", type=float, action="append", default=[], metavar="S", help="at S; repeatable")
    what.add_argument("--silence", type=float, default=2.0, metavar="S", help="until a loss is noticed [2]")
    what.add_argument("--slow-replica", type=above_0(), default=1.0, metavar="X", help="one takes X times as long [1]")
    what.add_argument("--stale-index", type=float, default=0.0, metavar="S", help="by which the prefix index lags [0]")
    what.add_argument("--wrong-cost", type=above_0(), default=1.0, metavar="X", help="factor on the router's model [1]")
    what.add_argument(
        "--transfer",
        default="0.1ms",
        metavar="TIME",
        help="of one token's KV blocks between nodes: its bytes, as --kv prints them, over the wire's rate [0.1ms]",
    )
    what.add_argument("--fit-requests", type=whole_number, default=2000, metavar="N", help="of the coarse level [2000]")


_DEFAULTS = {
    "route": "predicted_ttft",
    "copies": 1,
    "lose_replica": [],
    "silence": 2.0,
    "slow_replica": 1.0,
    "stale_index": 0.0,
    "wrong_cost": 1.0,
    "transfer": "0.1ms",
    "fit_requests": 2000,
}


def refuse_fleet_flags(given: argparse.Namespace, needed: str) -> None:
    """Refuse flags of a fleet that would do nothing without one. Raises ConfigError."""
    for name, value in _DEFAULTS.items():
        if getattr(given, name) != value:
            raise ConfigError(f"--{name.replace('_', '-')} needs {needed}")


def asked_fleet(given: argparse.Namespace, setup: Setup, replicas: int, slo: Slo) -> tuple[Fleet, list[str]]:
    """The fleet that the flags describe, and the policies. Raises ConfigError."""
    routes = [name.strip() for name in given.route.split(",")]
    if getattr(given, "plot", None) == "-":
        raise ConfigError("--plot of a fleet needs a FILE for its SVG")
    for name in routes:
        route_policy(name)
    fleet = Fleet(
        replica=setup,
        replicas=replicas,
        route=routes[0],
        lose_at=tuple(sorted(given.lose_replica)),
        silence=given.silence,
        slow=given.slow_replica,
        stale=given.stale_index,
        wrong_cost=given.wrong_cost,
        ttft_target=next((one.seconds for one in slo.objectives if one.name == "ttft_p95"), 0.0),
        for_prompts=getattr(given, "prompt_replicas", None) or 0,
        token_seconds=seconds(given.transfer, "--transfer"),
    )
    fleet.check()
    return fleet, routes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """How a fleet is simulated."""

    name: str
    fitted: Fitted | None = None

    def run(self, fleet: Fleet, rows: Sequence[TraceRow], speed: float) -> FleetOutcome:
        if self.name == "step":
            return simulate_steps(fleet, rows, speed=speed)
        return simulate_coarsely(fleet, rows, fit=self.fitted.fit if self.fitted else Fit(), speed=speed)


def simulate_fleet(
    given: argparse.Namespace, rows: Sequence[TraceRow], setup: Setup, slo: Slo, console: Console
) -> int:
    """Run each policy at the level asked for, print the table; the exit code."""
    fleet, routes = asked_fleet(given, setup, given.replicas, slo)
    rows = copies(rows, given.copies)
    names = _levels(given.level, fleet.replicas)
    reports: dict[str, list[FleetReport]] = {}
    plain: dict[str, object] = {"fleet": {**asdict(fleet), "replica": setup.settings()}}
    for name in names:
        level = _Level(
            name=name, fitted=_fit(given, fleet, rows, console, given.scale_rate) if name == "coarse" else None
        )
        runs = []
        for route in routes:
            one = replace(fleet, route=route)
            began = time.perf_counter()
            found = level.run(one, rows, given.scale_rate)
            took = time.perf_counter() - began
            runs.append((route, found))
            reports.setdefault(name, []).append(fleet_report(one, found, slo))
            console.print(f"{name} {route}: {len(rows):,} requests in {duration(took)}", highlight=False)
        _print(f"{fleet.replicas} replicas, {name} level", reports[name], console)
        plain[name] = [asdict(one) for one in reports[name]]
        if given.plot and name == names[0]:
            _plot(given.plot, runs, f"Time to first token, {fleet.replicas} replicas, {name} level")
    tokens = setup.scheduler.num_slots * fleet.replicas
    pooled = pooled_hits(rows, tokens)
    console.print(f"one cache of all {fleet.replicas} pools would have {pooled:.1%}", highlight=False)
    if len(names) == 2:
        _print_agreement(reports["step"], reports["coarse"], console)
    if given.json is not None:
        _write(given.json, plain | {"pooled_hits": pooled})
    return FAILED if any(one.report.misses for each in reports.values() for one in each) else DONE


def _levels(asked: str, replicas: int) -> list[str]:
    if asked == "auto":
        return ["step" if replicas <= MOST_STEP_REPLICAS else "coarse"]
    return ["step", "coarse"] if asked == "both" else [asked]


def _fit(
    given: argparse.Namespace, fleet: Fleet, rows: Sequence[TraceRow], console: Console, speed: float = 1.0
) -> Fitted:
    began = time.perf_counter()
    found = fitted(fleet, rows, requests=given.fit_requests, speed=speed)
    console.print(
        f"coarse level fitted to 2 replicas of the scheduler on {found.requests:,} requests in"
        f" {duration(time.perf_counter() - began)}: steps x {found.fit.seconds:g}, cache x {found.fit.cache:g}; coarse"
        f" over step there: TTFT p50 {found.p50:.2f}, p95 {found.p95:.2f}, hits {found.hits:.2f}",
        highlight=False,
    )
    return found


def _print(title: str, reports: Sequence[FleetReport], console: Console) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for column in ("cached", "TTFT p50", "p95", "p99", "in time", "ITL p95", "load", "Jain", "seen/told"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in reports:
        found = one.report
        table.add_row(
            one.route,
            f"{one.hits:.1%}",
            *(duration(value) for value in (found.ttft.p50, found.ttft.p95, found.ttft.p99)),
            f"{one.in_time:.1%}",
            duration(found.itl.p95),
            f"{one.load:.2f}",
            "-" if found.jain is None else f"{found.jain:.3f}",
            "-" if one.error_p50 is None else f"{one.error_p50:.2f}",
        )
    console.print(table)
    for one in reports:
        refused = sum(one.report.refused.values())
        rest = f"busy {one.busy:.0%}, E2E p95 {duration(one.report.e2e.p95)}, {one.moved:,} moved, {refused:,} refused"
        console.print(f"  {one.route:<16}{rest}", highlight=False)
        console.print(f"  {'':<16}{_wants(one)}", highlight=False)
        if one.passed_on:
            console.print(f"  {'':<16}{one.passed_on:,} prompts passed on, {one.late:,} of them late", highlight=False)
        for name, measured in one.report.misses.items():
            console.print(f"MISSED by {one.route}: {name} is {duration(measured)}", highlight=False)


def _print_agreement(step: Sequence[FleetReport], coarse: Sequence[FleetReport], console: Console) -> None:
    """How far the coarse level is from the step level, and in how many pairs of policies both agree."""
    same = total = 0
    for name, statistic in (("ttft", "p50"), ("ttft", "p95"), ("e2e", "p95")):
        mine, other = ([one.report.value(name, statistic) or 0.0 for one in each] for each in (step, coarse))
        found, pairs = pairs_in_order(mine, other)
        same, total = same + found, total + pairs
        apart = ", ".join(
            f"{one.route} {second / first - 1:+.0%}"
            for one, first, second in zip(step, mine, other, strict=True)
            if first
        )
        console.print(f"coarse against step, {name} {statistic}: {apart}", highlight=False)
    mine, other = ([one.hits for one in each] for each in (step, coarse))
    found, pairs = pairs_in_order(mine, other)
    text = f"{same + found} of {total + pairs} pairs that are 5 % apart in the same order"
    console.print(f"coarse against step: {text}", highlight=False)


def print_fleet_plan(  # noqa: PLR0917 - what is planned, and where it is printed
    given: argparse.Namespace,
    rows: Sequence[TraceRow],
    setup: Setup,
    ranks: Setup | None,
    slo: Slo,
    console: Console,
) -> int:
    """The fewest replicas for each policy; 1 where no number keeps the objectives.

    `ranks`: the server as several ranks, which is planned beside it.
    """
    fleet, routes = asked_fleet(given, setup, len(given.lose_replica) + 1, slo)
    rows = copies(rows, given.copies)
    level = _fit(given, fleet, rows, console)
    plans = plan_fleet(fleet, rows, slo, routes, fit=level.fit)
    told: dict[str, object] = {"plans": [asdict(plan) for plan in plans], "fit": asdict(level)}
    _print_plans(f"Replicas for {slo}, coarse level", plans, given.replica_cost, console)
    if ranks is not None:
        divided = replace(fleet, replica=ranks)
        beside = plan_fleet(divided, rows, slo, routes, fit=_fit(given, divided, rows, console).fit)
        told["ranks"] = [asdict(plan) for plan in beside]
        count = given.ranks
        _print_plans(f"The same of {count} ranks each", beside, given.replica_cost * count, console)
        _print_processors(plans[0], beside[0], count, console)
    if given.roles and plans[0].replicas:
        found = plan_roles(replace(fleet, route=plans[0].route, replicas=plans[0].replicas), rows, slo)
        told["roles"] = {"pays": found.pays, **asdict(found)}
        _print_roles(found, slo, console)
    if given.json is not None:
        _write(given.json, told)
    return DONE if plans[0].replicas else FAILED


def _print_plans(title: str, plans: Sequence[FleetPlan], cost: float, console: Console) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for column in ("replicas", "over halves", "cached", "TTFT p95", "busy", "cost / 1,000 requests", "one less misses"):
        table.add_column(column, justify="right")
    for plan in plans:
        table.add_row(plan.route, *_plan_cells(plan, cost))
    console.print(table)
    for plan in plans:
        if plan.at is not None:
            console.print(f"  {plan.route:<16}{_wants(plan.at)}", highlight=False)


def _print_processors(alone: FleetPlan, divided: FleetPlan, ranks: int, console: Console) -> None:
    """Replicas beside servers of ranks, by the processors that both take."""

    def told(plan: FleetPlan, each: int) -> str:
        if not plan.replicas:
            return "keep the objectives with no number of processors"
        return f"keep the objectives with {plan.replicas * each} processors"

    console.print(
        f"replicas {told(alone, 1)}; servers of {ranks} ranks {told(divided, ranks)}, each with the memory of {ranks}",
        highlight=False,
    )


def _print_roles(plan: RolesPlan, slo: Slo, console: Console) -> None:
    """All ways with their times, and whether roles pay."""
    table = Table(title="Roles, step level", title_justify="left")
    table.add_column("nodes")
    names = [(one.quantity, one.statistic) for one in slo.objectives]
    for column in (*(one.name for one in slo.objectives), "of the objectives", "prompts passed on", "late"):
        table.add_column(column, justify="right")
    for way in plan.ways:
        values = [way.at.report.value(*name) for name in names]
        table.add_row(
            _way_text(way),
            *("-" if value is None else duration(value) for value in values),
            f"{way.strain:.0%}" if way.strain < math.inf else "refuses",
            f"{way.at.passed_on:,}",
            f"{way.at.late:,}",
        )
    console.print(table)
    roles = plan.roles
    if plan.pays:
        text = (
            f"roles pay on this load: {_way_text(roles)} ({roles.strain:.0%} of the objectives) against"
            f" {_way_text(plan.without)} ({plan.without.strain:.0%}): start {roles.for_prompts} with --role prefill and"
            f" {roles.replicas - roles.for_prompts} with --role decode"
        )
    else:
        text = f"roles do not pay on this load: {_way_text(plan.without)} are as good or better; leave --role out"
    console.print(text, highlight=False)


def _way_text(way: Way) -> str:
    if way.for_prompts:
        return f"{way.replicas}, {way.for_prompts} of them for prompts"
    return f"{way.replicas} alike, itl_target {duration(way.itl_target)}" if way.itl_target else f"{way.replicas} alike"


def _wants(one: FleetReport) -> str:
    """The count that a front's metrics would have told an autoscaler."""
    return f"wants {one.wanted_mean:.1f} replicas, {one.wanted} at most"


def _plan_cells(plan: FleetPlan, cost: float) -> list[str]:
    if plan.at is None:
        return ["none keeps them", "-", "-", "-", "-", "-", "-"]
    found = plan.at.report
    hours = plan.replicas * found.seconds / _HOURS
    one_less = plan.one_less.report.misses if plan.one_less is not None else {}
    missed = ", ".join(f"{name} {duration(value)}" for name, value in one_less.items())
    return [
        f"{plan.replicas}",
        f"{plan.low} to {plan.high}",
        f"{plan.at.hits:.1%}",
        duration(found.ttft.p95),
        f"{plan.at.busy:.0%}",
        f"{hours * cost / max(found.served, 1) * 1000:.3g}",
        missed or "-",
    ]


def _plot(where: str, runs: Sequence[tuple[str, FleetOutcome]], title: str) -> None:
    try:
        Path(where).write_text(ttft_svg(runs, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {where} cannot be written: {error.strerror}") from None


def _write(path: Path, plain: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(plain, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None
