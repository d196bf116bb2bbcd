"""The numbers of a fleet's runs, policy beside policy; and the fewest replicas that keep objectives.

Promises: every number was simulated with the router that serves. Times are seconds of the simulated clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import log10

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError
from quire_engine.routing.prediction import prompt_seconds, prompt_tokens_a_step
from quire_engine.routing.views import ReplicaView
from quire_lab.simulation.coarse import Fit, simulate_coarsely
from quire_lab.simulation.fleet import Fleet, FleetOutcome
from quire_lab.simulation.report import Report, percentile, report
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.slo import Slo

MARGIN_SECONDS = 2.0  # beyond its own prompt's computation: then a first token came in time
MOST_REPLICAS = 1024  # that a plan tries
_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#b279a2", "#72757a")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """One policy's run."""

    route: str
    replicas: int
    report: Report
    hits: float  # share of prompt tokens that were cached
    in_time: float  # share of the requests with their first token within 2 s of their own prompt's computation
    load: float  # requests of the most loaded replica over the mean
    moved: int  # after losses
    error_p50: float | None  # seen TTFT over the predicted one, of the middle request
    busy: float  # share of the replicas' time
    wanted: int  # replicas that the requests asked for at most, as a front's metrics would have told
    wanted_mean: float  # over the run
    passed_on: int = 0  # prompts that a replica computed for another one
    late: int = 0  # of those: not all of it came in time


def fleet_report(fleet: Fleet, found: FleetOutcome, slo: Slo | None = None) -> FleetReport:
    """All numbers of a run."""
    made = report(found.outcome, slo)
    own = _own_seconds(fleet.replica)
    done = found.outcome.done
    ratios = sorted(found.ratios)
    mean = sum(found.counts) / len(found.counts)
    return FleetReport(
        route=fleet.route,
        replicas=fleet.replicas,
        report=made,
        hits=made.cached_tokens / max(made.prompt_tokens, 1),
        in_time=sum(one.ttft <= MARGIN_SECONDS + own(one.row.input_tokens) for one in done) / max(made.requests, 1),
        load=max(found.counts) / mean if mean else 1.0,
        moved=found.moved,
        error_p50=percentile(ratios, 50) if ratios else None,
        busy=made.busy / fleet.replicas,
        wanted=max(found.wanted, default=0),
        wanted_mean=sum(found.wanted) / max(len(found.wanted), 1),
        passed_on=found.passed_on,
        late=found.late,
    )


def _own_seconds(setup: Setup) -> Callable[[int], float]:
    """Seconds in which an idle replica computes a prompt of so many tokens."""
    idle = ReplicaView(name="", cohort="", state="ready", cost=setup.cost, limits=setup.scheduler.limits)
    a_step = prompt_tokens_a_step(idle)
    return lambda num_tokens: prompt_seconds(idle, num_tokens, a_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The fewest replicas that keep the objectives with one policy."""

    route: str
    replicas: int  # 0: no number up to the most that were tried
    low: int  # over halves of the load: the fewest that suffice for one of them
    high: int
    at: FleetReport | None
    one_less: FleetReport | None  # what one replica less would have missed


def plan_fleet(
    fleet: Fleet, rows: Sequence[TraceRow], slo: Slo, routes: Sequence[str], *, fit: Fit, speed: float = 1.0
) -> list[FleetPlan]:
    """Plan the fewest replicas for each policy, and return the best policy first. Raises ConfigError."""
    if not slo.objectives:
        raise ConfigError("a plan of a fleet needs objectives, such as ttft_p95=2s")
    plans = [_plan(replace(fleet, route=route), rows, slo, fit, speed) for route in routes]
    plans.sort(key=lambda plan: (plan.replicas == 0, plan.replicas))
    return plans


def _plan(fleet: Fleet, rows: Sequence[TraceRow], slo: Slo, fit: Fit, speed: float) -> FleetPlan:
    def run(count: int, part: Sequence[TraceRow]) -> FleetReport:
        one = replace(fleet, replicas=count)
        return fleet_report(one, simulate_coarsely(one, part, fit=fit, speed=speed), slo)

    def is_enough(count: int) -> bool:
        runs[count] = run(count, rows)
        return _kept(runs[count])

    runs: dict[int, FleetReport] = {}
    least = len(fleet.lose_at) + 1
    count = _fewest(is_enough, least)
    parts = (rows[: len(rows) // 2], rows[len(rows) // 2 :]) if count and len(rows) > 1 else ()
    halves = [_fewest(lambda number, part=part: _kept(run(number, part)), least) for part in parts]  # type: ignore[misc]
    return FleetPlan(
        route=fleet.route,
        replicas=count,
        low=min([count, *halves]),
        high=max([count, *halves]),
        at=runs.get(count),
        one_less=runs.get(count - 1),  # tried, since `count` is the fewest
    )


def _kept(found: FleetReport) -> bool:
    """Whether the objectives are kept and nothing is refused but what no server could serve."""
    return not found.report.misses and not any(reason != "infeasible" for reason in found.report.refused)


def _fewest(is_enough: Callable[[int], bool], least: int) -> int:
    """Return the smallest fleet that is enough, by doubling and binary search; 0 if even the largest is not."""
    high = least
    while not is_enough(high):
        if high >= MOST_REPLICAS:
            return 0
        high = min(high * 2, MOST_REPLICAS)
    low = high // 2 if high > least else least - 1  # not enough, or none
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def ttft_svg(runs: Sequence[tuple[str, FleetOutcome]], title: str) -> str:
    """Each policy's share of requests over their time to first token, on a logarithmic axis, as SVG."""
    width, height, margin = 900, 360, 50
    sorted_ttfts = [(name, sorted(max(one.ttft, 1e-3) for one in found.outcome.done)) for name, found in runs]
    least = min((ttfts[0] for _, ttfts in sorted_ttfts if ttfts), default=0.1)
    most = max((ttfts[-1] for _, ttfts in sorted_ttfts if ttfts), default=1.0)
    decades = _decades(least, most)

    def x(seconds: float) -> float:
        return round(margin + _place(seconds, decades[0], decades[-1]) * (width - 2 * margin), 2)

    def y(share: float) -> float:
        return round(height - margin - share * (height - 2 * margin), 2)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{margin}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for at in decades:
        lines.append(
            f'<path d="M{x(at)},{y(0)}V{y(1)}" stroke="#ddd"/>'
            f'<text x="{x(at)}" y="{height - 28}" font-size="11" text-anchor="middle">{at:g} s</text>'
        )
    for share in (0.0, 0.5, 0.95, 1.0):
        lines.append(f'<text x="{margin - 6}" y="{y(share) + 4}" font-size="11" text-anchor="end">{share:.0%}</text>')
    for number, (name, ttfts) in enumerate(sorted_ttfts):
        colour, points = _COLOURS[number % len(_COLOURS)], 200
        path = [
            f"{x(ttfts[int(step / points * (len(ttfts) - 1))])},{y(step / points)}"
            for step in range(points + 1)
            if ttfts
        ]
        lines.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(
            f'<text x="{width - margin - 150}" y="{y(0) - 16 * (number + 1)}" font-size="12" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def _decades(least: float, most: float) -> list[float]:
    """Powers of ten around both."""
    at = 1e-3
    while at * 10 <= least:
        at *= 10
    found = [at]
    while found[-1] < most:
        found.append(found[-1] * 10)
    return found if len(found) > 1 else [*found, found[-1] * 10]


def _place(value: float, low: float, high: float) -> float:
    """The place of a value between two powers of ten, linear in the logarithm."""
    return log10(value / low) / log10(high / low)


def pairs_in_order(first: Sequence[float], second: Sequence[float], apart: float = 0.05) -> tuple[int, int]:
    """(pairs that both put into the same order, all pairs) of two lists of the same things' values.

    Pairs that are less than `apart` apart in the first list have no order.
    """
    same = total = 0
    for one in range(len(first)):
        for other in range(one + 1, len(first)):
            if abs(first[one] - first[other]) > apart * max(abs(first[one]), abs(first[other])):
                total += 1
                same += (first[one] - first[other]) * (second[one] - second[other]) > 0
    return same, total
