"""The flags of `quire bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire_bench.arguments import parse_arguments
from quire_bench.servers import BenchError
from quire_bench.workload import LoadPoint, Span, Workload


def test_defaults():
    asked = parse_arguments([])
    assert asked.points == (LoadPoint(mode="concurrency", value=1), LoadPoint(mode="concurrency", value=8))
    assert (asked.url, asked.serve_flags, asked.repeat, asked.probe) == (None, (), 5, True)
    assert (str(asked.workload.input), str(asked.workload.output)) == ("128", "64")


def test_all_that_can_be_said():
    argv = "--concurrency 1,2,4 --input 16-32 --output 8 --prefix 4 --requests 9 --seconds 2.5 --seed 3 --repeat 2"
    argv += " --against http://b:1,vllm --against http://c:2 --baseline static --baseline static -- --kv-memory 1GiB -x"
    asked = parse_arguments(argv.split())
    assert [point.value for point in asked.points] == [1, 2, 4]
    assert [(peer.url, peer.name) for peer in asked.against] == [("http://b:1", "vllm"), ("http://c:2", None)]
    assert asked.baselines == ("static",)
    assert asked.serve_flags == ("--kv-memory", "1GiB", "-x")
    assert asked.workload == Workload(
        input=Span(low=16, high=32), output=Span(low=8, high=8), prefix=4, requests=9, seconds=2.5, seed=3
    )


def test_open_loops(tmp_path: Path):
    assert [str(point) for point in parse_arguments(["--rate", "0.5,2"]).points] == ["0.5 req/s", "2 req/s"]
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 500, "input_length": 100, "output_length": 10}\n')
    asked = parse_arguments(["--trace", str(trace), "--scale-rate", "1,2", "--scale-len", "0.5"])
    assert [str(point) for point in asked.points] == ["trace x1", "trace x2"]
    assert [(row.input_tokens, row.output_tokens) for row in asked.workload.trace] == [(50, 5)]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("--concurrency 1,x", "a whole number above 0, got 'x'"),
        ("--concurrency 0", "above 0"),
        ("--rate nan", "above 0"),
        ("--input 9-3", "64-256"),
        ("--vocab 1", "above 1"),
        ("--concurrency 1 --rate 2", "exclude each other"),
        ("--scale-rate 2", "--trace"),
        ("--trace /nowhere/trace.csv", "cannot be read"),
        ("--url http://a -- --port 3", "leave out --url"),
        ("--rate 1 --baseline static", "--concurrency"),
        ("--url http://a --baseline static", "--checkpoint"),
        ("--against /x/llama-bench --concurrency 1,8", "one stream"),
        ("--against /x/llama-bench --rate 1", "one stream"),
        ("--against /x/llama-bench --concurrency 1 --seconds 5", "--requests"),
        ("--url http://a --against /x/llama-bench --concurrency 1", "--checkpoint FILE"),
        ("--json /nowhere/at/all.json", "no such directory"),
        ("-- --uds=/tmp/x", "--uds"),
        ("--conc 1", "--conc"),
    ],
)
def test_flags_that_cannot_work(argv: str, complaint: str):
    with pytest.raises(BenchError, match=complaint):
        parse_arguments(argv.split())


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire_bench.arguments.find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"quire\[bench\]"):
        parse_arguments(["--plot", "x.png"])
