"""Turns an outcome into a report: latencies, goodput, memory, fairness, Little's law.

Promises: seconds and counts; a number that a run cannot give is None, never 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from quire_engine.scheduling.account import OUTPUT_COST
from quire_lab.simulation.outcome import Outcome, Served
from quire_lab.simulation.slo import Slo

_EDGE = 0.1  # share of a run that is left out at both ends to measure the steady state


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Seconds. None: there was nothing to measure."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        if not values:
            return cls()
        ordered = sorted(values)
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        mean = sum(ordered) / len(ordered)
        return cls(count=len(ordered), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantService:
    """The requests and the service of one tenant."""

    tenant: str
    requests: int
    refused: int
    service: float  # computed prompt tokens + 2 * output tokens
    cached: float  # share of its prompt tokens that were cached
    ttft_p50: float | None
    ttft_p95: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run. Times in seconds of the simulated clock, rates per second."""

    requests: int
    served: int
    refused: dict[str, int]  # by the limit that refused them
    seconds: float
    steps: int
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    queue: Distribution
    offered_rate: float
    request_rate: float
    output_token_rate: float
    busy: float  # share of the time in which steps were computed
    good: int  # requests within the objectives; without objectives all served requests
    goodput: float  # good requests per second
    misses: dict[str, float]  # measured values of the missed objectives
    peak_blocks: int
    peak_step: int
    pool_blocks: int
    mean_blocks: float
    cumulative_blocks: int
    preemptions: int
    preemptions_by_cause: dict[str, int]  # those that occurred
    most_preemptions: int  # of one request
    recomputed_tokens: int
    recomputed: float  # share of the computed tokens
    evictions: int
    guessed_tokens: int
    guessed_right: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    backlog_early: int  # requests accepted and unfinished after a quarter of the arrivals
    backlog_end: int  # the same after the last arrival
    little_in_flight: float
    little_residual: float | None  # 1 - lambda W / L over the middle of the run
    jain: float | None  # Jain's index of the tenants' services: 1 is even
    tenants: tuple[TenantService, ...]

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)

    def value(self, quantity: str, statistic: str) -> float | None:
        """A statistic such as `("ttft", "p95")`; None where nothing was measured."""
        found: float | None = getattr(getattr(self, quantity), statistic)
        return found


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, interpolated between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def report(outcome: Outcome, slo: Slo | None = None) -> Report:
    """All numbers of a run."""
    slo, done = slo or Slo(), outcome.done
    seconds = max(outcome.seconds, 1e-12)
    good = sum(1 for one in done if slo.is_good(ttft=one.ttft, tpot=one.tpot, e2e=one.e2e))
    ats = [one.at for one in outcome.requests]
    span = max(ats) - min(ats) if ats else 0.0
    tenants = _tenants(outcome.requests)
    in_flight, residual = little(outcome)
    made = Report(
        requests=len(outcome.requests),
        served=len(done),
        refused=dict(Counter(one.refused for one in outcome.requests if one.refused)),
        seconds=outcome.seconds,
        steps=outcome.steps,
        ttft=Distribution.of([one.ttft for one in done]),
        itl=Distribution.of(outcome.gaps),
        tpot=Distribution.of([one.tpot for one in done if one.tpot is not None]),
        e2e=Distribution.of([one.e2e for one in done]),
        queue=Distribution.of([one.queue_seconds for one in done]),
        offered_rate=(len(ats) - 1) / span if span else 0.0,
        request_rate=len(done) / seconds,
        output_token_rate=sum(one.num_tokens for one in done) / seconds,
        busy=outcome.busy_seconds / seconds,
        good=good,
        goodput=good / seconds,
        misses={},
        peak_blocks=outcome.peak_blocks,
        peak_step=outcome.peak_step,
        pool_blocks=outcome.num_blocks,
        mean_blocks=outcome.block_steps / max(1, outcome.steps),
        cumulative_blocks=outcome.cumulative_blocks,
        preemptions=outcome.total_preemptions,
        preemptions_by_cause={cause: count for cause, count in outcome.preemptions_by_cause.items() if count},
        most_preemptions=max((one.preemptions for one in done), default=0),
        recomputed_tokens=outcome.recomputed_tokens,
        recomputed=outcome.recomputed_tokens / max(1, outcome.computed_tokens),
        evictions=outcome.evictions,
        guessed_tokens=outcome.guessed_tokens,
        guessed_right=outcome.guessed_right,
        prompt_tokens=sum(one.row.input_tokens for one in done),
        cached_tokens=sum(one.cached_tokens for one in done),
        computed_tokens=outcome.computed_tokens,
        backlog_early=_live_at(outcome, sorted(ats)[len(ats) // 4]) if ats else 0,
        backlog_end=_live_at(outcome, max(ats)) if ats else 0,
        little_in_flight=in_flight,
        little_residual=residual,
        jain=jain([tenant.service for tenant in tenants]) if len(tenants) > 1 else None,
        tenants=tenants if len(tenants) > 1 else (),
    )
    made.misses.update(slo.misses(made.value))
    return made


def jain(values: Sequence[float]) -> float | None:
    """Jain's index of fairness: 1 if all are equal, 1/n if one has all; None if all are 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def little(outcome: Outcome) -> tuple[float, float | None]:
    """L, and 1 - lambda W / L over the middle of the run; far from 0 the run was not in a steady state."""
    if not outcome.live:
        return 0.0, None
    began = outcome.live[0][0]
    length = outcome.seconds - began
    start, end = began + _EDGE * length, outcome.seconds - _EDGE * length
    area = sum(
        count * max(0.0, min(until, end) - max(since, start))
        for (since, count), (until, _) in pairwise([*outcome.live, (outcome.seconds, 0)])
    )
    times = [one.e2e for one in outcome.done if start <= one.last_at < end]
    if not times or not area:
        return 0.0, None
    return area / (end - start), 1 - sum(times) / area


def _live_at(outcome: Outcome, at: float) -> int:
    """Accepted and unfinished requests after the first change at or after a time."""
    place = bisect_left(outcome.live, at, key=lambda change: change[0])
    return outcome.live[min(place, len(outcome.live) - 1)][1] if outcome.live else 0


def _tenants(requests: Sequence[Served]) -> tuple[TenantService, ...]:
    by_name: dict[str, list[Served]] = {}
    for one in requests:
        by_name.setdefault(one.row.tenant, []).append(one)
    found = []
    for name, theirs in sorted(by_name.items()):
        done = [one for one in theirs if not one.refused]
        asked, cached = sum(one.row.input_tokens for one in done), sum(one.cached_tokens for one in done)
        ttft = Distribution.of([one.ttft for one in done])
        found.append(
            TenantService(
                tenant=name,
                requests=len(theirs),
                refused=len(theirs) - len(done),
                service=asked - cached + OUTPUT_COST * sum(one.num_tokens for one in done),
                cached=cached / asked if asked else 0.0,
                ttft_p50=ttft.p50,
                ttft_p95=ttft.p95,
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number of two reports, before and after."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float | None:
        """The ratio of after to before; None where before is 0."""
        return self.after / self.before if self.before else None


def compare(before: Mapping[str, object], after: Mapping[str, object]) -> list[Difference]:
    """The numbers that two reports, as plain values, both have and that differ, by their path in the report."""
    old = dict(_numbers(before))
    return [
        Difference(name=name, before=old[name], after=value)
        for name, value in _numbers(after)
        if name in old and old[name] != value
    ]


def _numbers(plain: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
