"""The requests of a benchmark: exact lengths, the same for every server, arrivals that are Poisson; traces."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest

from quire_bench.traces import TraceError, TraceRow, read_trace
from quire_bench.workload import OPEN_LOOP_SECONDS, LoadPoint, Span, Workload, jobs, warm_up

DATA = Path(__file__).parents[3] / "benchmarks" / "data"
CLOSED = LoadPoint(mode="concurrency", value=4)


def rate(value: float) -> LoadPoint:
    return LoadPoint(mode="rate", value=value)


def workload(**changes: object) -> Workload:
    values = {"input": Span(low=5, high=9), "output": Span(low=3, high=3), "vocab": 500, "requests": 40}
    return Workload(**(values | changes))


def test_lengths_are_exact_and_cover_the_span():
    made = list(jobs(workload(prefix=7), CLOSED, 0))
    assert len(made) == 40
    assert {len(job.prompt) - 7 for job in made} == {5, 6, 7, 8, 9}
    assert {job.output_tokens for job in made} == {3}
    assert all(100 <= token < 500 for job in made for token in job.prompt)
    assert len({tuple(job.prompt[:7]) for job in made}) == 1
    assert len({tuple(job.prompt[7:]) for job in made}) == 40


def test_small_vocabularies_are_stayed_within():
    made = jobs(workload(vocab=8), CLOSED, 0)
    assert {token for job in made for token in job.prompt} <= {4, 5, 6, 7}


def test_every_server_gets_the_same_and_every_round_something_else():
    assert list(jobs(workload(), CLOSED, 1)) == list(jobs(workload(), CLOSED, 1))
    prompts = [
        tuple(job.prompt)
        for seed in (0, 1)
        for round_number in range(2)
        for point in (CLOSED, LoadPoint(mode="concurrency", value=8))
        for job in jobs(workload(prefix=6, seed=seed), point, round_number)
    ]
    assert len(set(prompts)) == len(prompts)
    assert len({prompt[:6] for prompt in prompts}) == 4  # one prefix for each round and seed
    warm = {tuple(job.prompt) for job in warm_up(workload(input=Span(low=9, high=9)), 5)}
    assert len(warm) == 5
    assert not warm & set(prompts)


def test_how_many_requests():
    unbounded = workload(requests=None)
    assert len(list(jobs(unbounded, LoadPoint(mode="concurrency", value=1), 0))) == 8
    assert len(list(jobs(unbounded, LoadPoint(mode="concurrency", value=16), 0))) == 64
    assert len(list(jobs(unbounded, rate(4), 0))) == 4 * OPEN_LOOP_SECONDS
    assert len(list(islice(jobs(workload(requests=None, seconds=1), CLOSED, 0), 1000))) == 1000  # time ends it


def test_arrivals_are_poisson():
    made = list(jobs(workload(requests=4000), rate(20), 0))
    gaps = [b.due - a.due for a, b in pairwise(made)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    assert variance == pytest.approx(mean**2, rel=0.2)  # of an exponential distribution


def test_seconds_bound_the_arrivals():
    made = list(jobs(workload(requests=None, seconds=10), rate(30), 0))
    assert 200 < len(made) < 400
    assert made[-1].due <= 10


@pytest.mark.parametrize("text", ["", "0", "-3", "9-5", "a", "1-", "1.5", "log:", "log:0-8", "log:9-5", "log"])
def test_spans_that_are_none(text: str):
    with pytest.raises(ValueError):
        Span.parse(text)


def test_spans():
    assert (Span.parse("7"), Span.parse("3-9")) == (Span(low=7, high=7), Span(low=3, high=9))
    assert [str(Span.parse(text)) for text in ("7", "3-9")] == ["7", "3-9"]


def test_long_tails_have_as_many_short_lengths_as_long_ones_of_twice_the_size():
    span = Span.parse("log:8-1023")
    assert (str(span), span) == ("log:8-1023", Span(low=8, high=1023, is_long_tailed=True))
    rng = random.Random(1)
    drawn = [span.draw(rng) for _ in range(7000)]
    assert min(drawn) == 8
    assert 1000 < max(drawn) <= 1023
    octaves = Counter(length.bit_length() for length in drawn)  # 4 is 8 to 15
    assert all(900 < count < 1100 for count in octaves.values()), octaves
    assert len(octaves) == 7


def test_azure_sample():
    rows = read_trace(DATA / "azure_conv_sample.csv")
    assert len(rows) == 200
    assert rows[0] == TraceRow(at=0.0, input_tokens=374, output_tokens=44)
    assert rows[1].at == pytest.approx(50.9951690 - 46.6805900, abs=1e-5)
    assert list(rows) == sorted(rows, key=lambda row: row.at)


def test_mooncake_sample():
    rows = read_trace(DATA / "mooncake_conversation_sample.jsonl", scale_length=0.125)
    assert len(rows) == 60
    assert (rows[0].input_tokens, rows[0].output_tokens) == (round(6758 / 8), round(500 / 8))
    assert rows[0].blocks == tuple(range(14))
    assert rows[0].block_tokens == 64


def test_traced_requests_share_what_their_blocks_share():
    rows = read_trace(DATA / "mooncake_conversation_sample.jsonl", scale_length=0.1)
    point = LoadPoint(mode="trace", value=2.0)
    made = list(jobs(workload(requests=None, trace=rows), point, 0))
    assert [len(job.prompt) for job in made] == [row.input_tokens for row in rows]
    assert [job.due for job in made] == [row.at / 2 for row in rows]
    first, second = made[0].prompt, made[1].prompt
    shared = rows[0].block_tokens  # both begin with block 0, and share no other
    assert first[:shared] == second[:shared]
    assert first[shared : 2 * shared] != second[shared : 2 * shared]
    again = next(iter(jobs(workload(trace=rows), point, 1)))
    assert again.prompt[:shared] != first[:shared]  # another round
    assert len(list(jobs(workload(requests=7, trace=rows), point, 0))) == 7
    early = list(jobs(workload(requests=None, seconds=1.0, trace=rows), point, 0))
    assert len(early) == sum(row.at <= 2.0 for row in rows)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", ":1: expected the columns"),
        ("a,b\n1,2\n", ":1: expected the columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no rows"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", ":2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", ":2: "),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 1}\n', ":2: "),
        ("{}\n", ":1: "),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: str, complaint: str):
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(TraceError, match=complaint):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "absent")
