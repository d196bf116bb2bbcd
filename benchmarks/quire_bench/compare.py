"""Several rounds of several servers: medians, spread, ratios of pairs measured next to each other, knees.

Promises: a ratio is taken within a round and only then summarised, so that a machine that drifts cancels out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from quire_bench.measures import Measures
from quire_bench.workload import LoadPoint

# What is summarised over rounds, by name. Latencies in milliseconds.
QUANTITIES: Mapping[str, Callable[[Measures], float | None]] = {
    "output_tok_s": lambda run: run.output_tok_s if run.ok else None,
    "total_tok_s": lambda run: run.total_tok_s if run.ok else None,
    "req_s": lambda run: run.req_s if run.ok else None,
    "ttft_p50_ms": lambda run: run.ttft_ms.p50,
    "ttft_p99_ms": lambda run: run.ttft_ms.p99,
    "tpot_p50_ms": lambda run: run.tpot_ms.p50,
    "tpot_p99_ms": lambda run: run.tpot_ms.p99,
    "itl_p50_ms": lambda run: run.itl_ms.p50,
    "itl_p99_ms": lambda run: run.itl_ms.p99,
    "e2e_p50_ms": lambda run: run.e2e_ms.p50,
}
SATURATED = 0.9  # of the best throughput: the knee of a closed-loop sweep
SUSTAINED = 0.95  # of the offered rate: what an open loop must complete to be below its knee


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median, least and most of one number over rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=median(values), min=min(values), max=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """The load from which on more brings no more. `reached` is False when the sweep ended before."""

    value: float  # of the load point
    throughput: float  # output tokens per second there
    reached: bool


def summarise(rounds: Sequence[Measures]) -> dict[str, Spread]:
    """Every quantity that some round has."""
    spreads = {}
    for name, quantity in QUANTITIES.items():
        values = [value for run in rounds if (value := quantity(run)) is not None]
        if values:
            spreads[name] = Spread.of(values)
    return spreads


def ratios(ours: Sequence[Measures], theirs: Sequence[Measures]) -> dict[str, Spread]:
    """Ours over theirs, round by round. More is better for rates, less for times."""
    spreads = {}
    for name, quantity in QUANTITIES.items():
        pairs = [(quantity(one), quantity(other)) for one, other in zip(ours, theirs, strict=True)]
        values = [one / other for one, other in pairs if one is not None and other]
        if values:
            spreads[name] = Spread.of(values)
    return spreads


def knee(points: Sequence[tuple[LoadPoint, Sequence[Measures]]]) -> Knee | None:
    """Find a sweep's knee in one mode, by rising load; None for fewer than three points, or if nothing came back.

    Closed loop: the least concurrency with 90 % of the best throughput. Open loop: the highest rate at which, in the
    middle of the run, 95 % of what arrives is completed.
    """
    sweep = sorted(
        ((point, rounds) for point, rounds in points if any(run.ok for run in rounds)), key=lambda item: item[0].value
    )
    if len(sweep) < 3 or sweep[0][0].mode == "trace":
        return None
    speeds = [median(run.output_tok_s for run in rounds) for _, rounds in sweep]
    if sweep[0][0].mode == "rate":
        holds = [place for place, (_, rounds) in enumerate(sweep) if median(map(_completed, rounds)) >= SUSTAINED]
    else:
        holds = [place for place, speed in enumerate(speeds) if speed >= SATURATED * max(speeds)]
    if not holds:
        return None
    place = holds[-1] if sweep[0][0].mode == "rate" else holds[0]
    return Knee(value=sweep[place][0].value, throughput=speeds[place], reached=place < len(sweep) - 1)


def _completed(run: Measures) -> float:
    return run.little.arrival_rate / run.offered_req_s if run.offered_req_s else 0.0
