"""The numbers of a run from its records: throughput, latencies, errors, Little's law.

Promises: latencies are those of requests that ended well, in milliseconds; throughput counts the tokens of these over
the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from quire_bench.records import Record, Run

_EDGE = 0.1  # of a run, left out at both ends when a steady state is looked for
_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """None: there was nothing to measure."""

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
        return cls(
            mean=sum(ordered) / len(ordered),
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p95=percentile(ordered, 95),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Little:
    """L = lambda W over the middle of a run. Far from 0: no steady state, or somebody's clock or count is wrong."""

    in_flight: float  # L, requests, averaged over time
    arrival_rate: float  # lambda, requests that ended per second
    time_in_system: float  # W, seconds, of these
    residual: float | None  # 1 - lambda W / L


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One run. Rates per second, latencies in milliseconds."""

    seconds: float
    requests: int
    ok: int
    errors: dict[str, int]  # by outcome
    error_examples: tuple[str, ...]
    wrong_length: int  # replies whose length is not what was asked for
    input_tokens: int
    output_tokens: int
    chunks: int
    output_tok_s: float
    total_tok_s: float
    req_s: float
    offered_req_s: float  # at which requests were due
    ttft_ms: Distribution
    tpot_ms: Distribution  # of each request: time from first to last chunk over its tokens less one
    itl_ms: Distribution  # between chunks, of all requests together
    e2e_ms: Distribution
    send_lag_ms: float  # the latest that a request was sent after it was due: the load generator's own fault
    little: Little


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, interpolated between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def measure(run: Run) -> Measures:
    """All numbers of a run."""
    good = [record for record in run.records if record.is_ok]
    bad = [record for record in run.records if not record.is_ok]
    seconds = max(run.seconds, 1e-9)
    input_tokens = sum(record.input_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    return Measures(
        seconds=run.seconds,
        requests=len(run.records),
        ok=len(good),
        errors=dict(Counter(record.outcome for record in bad)),
        error_examples=tuple({f"{record.outcome}: {record.detail}": None for record in bad})[:_EXAMPLES],
        wrong_length=sum(record.output_tokens != record.asked_tokens for record in good),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        chunks=sum(len(record.arrivals) for record in good),
        output_tok_s=output_tokens / seconds,
        total_tok_s=(input_tokens + output_tokens) / seconds,
        req_s=len(good) / seconds,
        offered_req_s=_offered(run.records),
        ttft_ms=Distribution.of([1e3 * (record.arrivals[0] - record.due) for record in good]),
        tpot_ms=Distribution.of([1e3 * _time_per_token(record) for record in good if record.output_tokens > 1]),
        itl_ms=Distribution.of([1e3 * (b - a) for record in good for a, b in pairwise(record.arrivals)]),
        e2e_ms=Distribution.of([1e3 * (record.ended - record.due) for record in good]),
        send_lag_ms=1e3 * max((record.sent - record.due for record in good), default=0.0),
        little=little(run),
    )


def _offered(records: Sequence[Record]) -> float:
    dues = [record.due for record in records]
    return (len(dues) - 1) / (max(dues) - min(dues)) if len(dues) > 1 and max(dues) > min(dues) else 0.0


def _time_per_token(record: Record) -> float:
    return (record.arrivals[-1] - record.arrivals[0]) / (record.output_tokens - 1)


def little(run: Run) -> Little:
    """Compute both sides of Little's law, from counts and from latencies, which are taken independently."""
    start, end = run.started + _EDGE * run.seconds, run.ended - _EDGE * run.seconds
    length = max(end - start, 1e-9)
    area = 0.0
    changes = [*run.in_flight, (run.ended, 0)]
    for (since, count), (until, _) in pairwise(changes):
        area += count * max(0.0, min(until, end) - max(since, start))
    times = [record.ended - record.sent for record in run.records if start <= record.ended < end]
    in_flight, rate = area / length, len(times) / length
    mean = sum(times) / len(times) if times else 0.0
    residual = 1 - rate * mean / in_flight if in_flight and times else None
    return Little(in_flight=in_flight, arrival_rate=rate, time_in_system=mean, residual=residual)
