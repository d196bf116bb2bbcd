"""From records to numbers: throughput, percentiles, errors, Little's law, ratios of pairs, knees."""

from __future__ import annotations

import random

import numpy
import pytest

from quire_bench.compare import knee, ratios, summarise
from quire_bench.measures import Distribution, Measures, measure, percentile
from quire_bench.records import Record, Run
from quire_bench.workload import LoadPoint


def answered(start: float, *arrivals: float, tokens: int | None = None, prompt: int = 10) -> Record:
    count = len(arrivals) if tokens is None else tokens
    return Record(
        due=start,
        sent=start,
        arrivals=[start + at for at in arrivals],
        ended=start + arrivals[-1],
        outcome="ok",
        input_tokens=prompt,
        asked_tokens=count,
        output_tokens=count,
    )


def run_of(*records: Record, seconds: float = 10.0) -> Run:
    changes = sorted(
        [(record.sent, 1) for record in records] + [(record.ended, -1) for record in records], key=lambda item: item[0]
    )
    run, count = Run(started=0.0, ended=seconds, records=list(records)), 0
    for at, change in changes:
        count += change
        run.in_flight.append((at, count))
    return run


def test_percentiles_are_those_of_numpy():
    rng = random.Random(3)
    for size in (1, 2, 3, 10, 101, 1000):
        values = sorted(rng.expovariate(1) for _ in range(size))
        for percent in (0, 50, 90, 99, 100):
            assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert Distribution.of([3.0, 1.0, 2.0]) == Distribution(mean=2.0, p50=2.0, p90=2.8, p95=2.9, p99=2.98, max=3.0)
    assert Distribution.of([]) == Distribution()


def test_one_request():
    measures = measure(run_of(answered(1.0, 0.2, 0.3, 0.5), seconds=2.0))
    assert (measures.requests, measures.ok, measures.chunks) == (1, 1, 3)
    assert (measures.output_tok_s, measures.total_tok_s, measures.req_s) == (1.5, 6.5, 0.5)
    assert measures.ttft_ms.p50 == pytest.approx(200)
    assert measures.tpot_ms.p50 == pytest.approx(150)
    assert measures.itl_ms.max == pytest.approx(200)
    assert measures.itl_ms.mean == pytest.approx(150)
    assert measures.e2e_ms.p99 == pytest.approx(500)


def test_a_chunk_may_carry_several_tokens():
    measures = measure(run_of(answered(0.0, 0.1, 0.5, tokens=5)))
    assert measures.output_tokens == 5
    assert measures.chunks == 2
    assert measures.tpot_ms.p50 == pytest.approx(100)
    assert measures.itl_ms.p50 == pytest.approx(400)


def test_one_token_has_no_time_per_token():
    measures = measure(run_of(answered(0.0, 0.1)))
    assert measures.tpot_ms == measures.itl_ms == Distribution()
    assert measures.ttft_ms.p50 == pytest.approx(100)


def test_latencies_count_from_when_a_request_was_due():
    late = answered(1.0, 0.1, 0.2)
    late.due = 0.25
    measures = measure(run_of(late))
    assert measures.ttft_ms.p50 == pytest.approx(850)
    assert measures.send_lag_ms == pytest.approx(750)


def test_errors_are_counted_by_kind_and_nowhere_else():
    bad = [Record(due=0.0, ended=0.1, outcome="http_429", detail="full", input_tokens=99) for _ in range(3)]
    broken = Record(due=0.0, arrivals=[0.2], ended=0.3, outcome="broken", detail="lost", output_tokens=7)
    measures = measure(run_of(answered(0.0, 0.1, 0.2), *bad, broken))
    assert (measures.requests, measures.ok) == (5, 1)
    assert measures.errors == {"http_429": 3, "broken": 1}
    assert measures.error_examples == ("http_429: full", "broken: lost")
    assert (measures.input_tokens, measures.output_tokens) == (10, 2)
    assert measures.ttft_ms.max == pytest.approx(100)


def test_replies_of_another_length_are_told():
    short = answered(0.0, 0.1, 0.2)
    short.asked_tokens = 3
    assert measure(run_of(short, answered(0.0, 0.1))).wrong_length == 1


def test_nothing_answered():
    measures = measure(run_of(Record(due=0.0, ended=0.1, outcome="unreachable")))
    assert measures.output_tok_s == 0
    assert measures.ttft_ms == Distribution()
    assert measures.little.residual is None
    assert measure(Run(started=0.0, ended=0.0)).requests == 0


def test_little_holds_in_a_steady_state_and_tells_when_something_is_missing():
    records = [answered(0.1 * i, 0.25, 0.5) for i in range(1000)]
    steady = measure(run_of(*records, seconds=100.0)).little
    assert steady.in_flight == pytest.approx(5.0, rel=0.02)
    assert steady.arrival_rate == pytest.approx(10.0, rel=0.02)
    assert steady.time_in_system == pytest.approx(0.5)
    assert abs(steady.residual) < 0.02
    run = run_of(*records, seconds=100.0)
    del run.records[::2]  # somebody forgets every other one
    assert measure(run).little.residual == pytest.approx(0.5, abs=0.02)


def test_offered_rate():
    assert measure(run_of(*[answered(0.25 * i, 0.1) for i in range(9)])).offered_req_s == pytest.approx(4.0)
    assert measure(run_of(answered(0.0, 0.1))).offered_req_s == 0


def speed(tok_s: float) -> Measures:
    """One request with 10 tokens, at so many tokens per second."""
    return measure(run_of(answered(0.0, 5 / tok_s, 10 / tok_s, tokens=10), seconds=10 / tok_s))


def test_ratios_are_those_of_pairs():
    ours, theirs = [speed(10), speed(20), speed(30)], [speed(5), speed(20), speed(10)]
    found = ratios(ours, theirs)["output_tok_s"]
    assert (found.min, found.median, found.max) == pytest.approx((1.0, 2.0, 3.0))
    assert summarise(ours)["output_tok_s"].median / summarise(theirs)["output_tok_s"].median == pytest.approx(2.0)
    drifting = ratios([speed(10), speed(100)], [speed(5), speed(50)])["output_tok_s"]
    assert (drifting.min, drifting.max) == pytest.approx((2.0, 2.0))
    with pytest.raises(ValueError):
        ratios(ours, theirs[:2])


def test_no_ratio_without_two_numbers():
    failed = measure(run_of(Record(due=0.0, ended=0.1, outcome="broken")))
    assert "output_tok_s" not in ratios([speed(1)], [failed])
    assert summarise([failed]) == {}


def sweep(*speeds: float) -> list[tuple[LoadPoint, list[Measures]]]:
    return [(LoadPoint(mode="concurrency", value=2**i), [speed(s)] * 3) for i, s in enumerate(speeds)]


def test_knee_of_a_closed_loop():
    found = knee(sweep(10, 20, 37, 40, 38))
    assert (found.value, found.reached) == (4, True)
    assert found.throughput == pytest.approx(37)
    assert knee(list(reversed(sweep(10, 20, 37, 40, 38)))) == found
    rising = knee(sweep(10, 20, 40, 80))
    assert (rising.value, rising.reached) == (8, False)
    assert knee(sweep(10, 20)) is None


def test_knee_of_an_open_loop():
    """A server that completes four requests per second, whatever is offered."""
    points = []
    for offered in (1.0, 2.0, 4.0, 8.0):
        interval = max(1 / offered, 0.25)
        records = []
        for i in range(200):
            record = answered(i / offered, 0.01)
            record.ended = i * interval + 0.1
            records.append(record)
        run = run_of(*records, seconds=200 * interval)
        points.append((LoadPoint(mode="rate", value=offered), [measure(run)]))
    found = knee(points)
    assert (found.value, found.reached) == (4.0, True)
    assert knee(points[:3]).reached is False
