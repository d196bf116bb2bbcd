"""Flags, limits, the JSON file, the table and the plot of `quire bench`."""

from __future__ import annotations

import io
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from quire_bench import command
from quire_bench.arguments import parse_arguments
from quire_bench.compare import Knee
from quire_bench.limits import Limits, is_measurable, request_flop, shares, token_bytes
from quire_bench.measures import Measures, measure
from quire_bench.records import Record, Run
from quire_bench.report import print_report
from quire_bench.results import SCHEMA, Collected, Results, command_line, describe, describe_machine, versions
from quire_bench.servers import BenchError, ModelFacts, ServerInfo, read_facts
from quire_bench.workload import LoadPoint, Span, Workload
from quire_server.metrics.metrics import Metrics
from support.fakes import make_plan

FACTS = ModelFacts(
    architecture="Qwen3ForCausalLM",
    parameters=1200,
    layer_parameters=1000,
    sampled_parameters=200,
    layer_attention=8,
    sampled_attention=3,
    read_bytes=2400,
    weight_type="bfloat16",
    kv_bytes_per_token=16.0,
    device="cpu",
    kernels="cpu",
    num_threads=2,
)
LIMITS = Limits(
    variant="avx512_bf16",
    threads=2,
    fp32_per_second=1e6,
    bf16_per_second=2e6,
    int8_per_second=4e6,
    read_bytes_per_second=1e6,
    cache_bytes=1000,
)
WORKLOAD = Workload(input=Span(low=4, high=4), output=Span(low=3, high=3))
ALONE = LoadPoint(mode="concurrency", value=1)


def run_with(*, ttft: float, tpot: float, requests: int = 2) -> Measures:
    """Requests of 4 + 3 tokens, one after the other."""
    length = ttft + 2 * tpot
    records = [
        Record(
            due=i * length,
            sent=i * length,
            arrivals=[i * length + ttft + token * tpot for token in range(3)],
            ended=(i + 1) * length,
            outcome="ok",
            input_tokens=4,
            asked_tokens=3,
            output_tokens=3,
        )
        for i in range(requests)
    ]
    return measure(Run(started=0.0, ended=requests * length, records=records))


# -- flags


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


# -- limits


def test_facts_are_read_from_a_servers_metrics():
    metrics = Metrics("tiny")
    plan = make_plan()
    parts = {"layer_parameters": 700, "sampled_parameters": 300, "layer_attention": 64, "sampled_attention": 16}
    metrics.observe_plan(replace(plan, **parts, weights_read_bytes=900))
    assert read_facts(metrics.render().decode()) == ModelFacts(
        architecture=plan.architecture,
        parameters=plan.num_parameters,
        **parts,
        read_bytes=900,
        weight_type="float32",
        kv_bytes_per_token=plan.bytes_per_block / 16,
        device="cpu",
        kernels="reference",
        num_threads=1,
    )
    metrics.observe_plan(replace(plan, quantization="int8"))
    quantized = read_facts(metrics.render().decode())
    assert quantized is not None
    assert quantized.weight_type == "int8"
    assert read_facts("") is None
    assert read_facts('vllm:cache_config_info{block_size="16"} 1.0\nup 1\n') is None


def test_operations_are_those_of_every_token():
    """Counted one by one: a token's products, what it looks at; the end for each that is sampled from."""
    for inputs, outputs in ((4, 3), (1, 1), (7, 1)):
        total = 0
        for position in range(inputs + outputs - 1):
            total += 2 * FACTS.layer_parameters + 4 * FACTS.layer_attention * (position + 1)
            if position >= inputs - 1:
                total += 2 * FACTS.sampled_parameters + 4 * FACTS.sampled_attention * (position + 1)
        assert request_flop(FACTS, inputs, outputs) == total


def test_bytes_of_a_token():
    assert token_bytes(FACTS, 10) == 2400 + 160


def test_shares_of_one_stream():
    run = run_with(ttft=0.5, tpot=0.01)
    found = shares(ALONE, WORKLOAD, run, FACTS, LIMITS)
    assert found.prefill == pytest.approx(request_flop(FACTS, 4, 1) / 0.5 / 2e6)
    assert found.decode_read == pytest.approx(token_bytes(FACTS, 5.5) / 0.01 / 1e6)
    assert found.arithmetic == pytest.approx(request_flop(FACTS, 4, 3) / 0.52 / 2e6)


def test_what_is_not_known_is_not_told():
    run = run_with(ttft=0.5, tpot=0.01)
    many = shares(LoadPoint(mode="concurrency", value=4), WORKLOAD, run, FACTS, LIMITS)
    assert many.prefill is many.decode_read is None
    assert many.arithmetic is not None
    cached = shares(ALONE, replace(WORKLOAD, prefix=9), run, FACTS, LIMITS)
    assert cached.arithmetic is cached.prefill is cached.decode_read is None


def test_what_a_cache_holds_is_not_read_from_memory():
    big = msgspec.structs.replace(LIMITS, cache_bytes=2000)
    found = shares(ALONE, WORKLOAD, run_with(ttft=0.5, tpot=0.01), FACTS, big)
    assert found.decode_read is None
    assert found.prefill is not None


def test_the_peak_is_that_of_the_weights_type():
    assert [LIMITS.arithmetic(name) for name in ("float32", "bfloat16", "int8", "int4")] == [1e6, 2e6, 4e6, 4e6]
    old = msgspec.structs.replace(LIMITS, bf16_per_second=0.0, int8_per_second=0.0)
    assert {old.arithmetic(name) for name in ("float32", "bfloat16", "int8")} == {1e6}


def test_the_best_of_each_limit_counts():
    other = msgspec.structs.replace(LIMITS, bf16_per_second=3e6, read_bytes_per_second=5e5)
    best = LIMITS.best(other)
    assert (best.bf16_per_second, best.read_bytes_per_second, best.fp32_per_second) == (3e6, 1e6, 1e6)


def test_only_this_machines_processor_is_compared_with_its_limits():
    here = ServerInfo(name="a", address="http://127.0.0.1:8", model="m", facts=FACTS)
    assert is_measurable(here)
    assert not is_measurable(msgspec.structs.replace(here, address="http://10.0.0.3:8"))
    assert not is_measurable(msgspec.structs.replace(here, facts=None))
    gpu = msgspec.structs.replace(FACTS, device="cuda")
    assert not is_measurable(msgspec.structs.replace(here, facts=gpu))


# -- what is written


def results() -> Results:
    points = tuple(LoadPoint(mode="concurrency", value=value) for value in (1, 2, 4))
    infos = [
        ServerInfo(name=name, address=f"http://127.0.0.1:{port}", model="m", facts=FACTS)
        for port, name in ((1, "quire"), (2, "peer"))
    ]
    collected = Collected(points=points, servers=infos)
    for point in points:
        for slowness in (1.0, 1.5, 1.2):
            speed = slowness / min(point.value, 2)
            collected.add(point, "quire", run_with(ttft=0.1 * speed, tpot=0.01 * speed))
            collected.add(point, "peer", run_with(ttft=0.1 * speed, tpot=0.04 * speed))
    collected.shares[points[0], "quire"] = [
        shares(points[0], WORKLOAD, run, FACTS, LIMITS) for run in collected.runs[points[0], "quire"]
    ]
    return Results(
        schema=SCHEMA,
        started="2026-01-01T00:00:00Z",
        command=command_line(["--concurrency", "1,2,4"]),
        versions=versions(),
        machine=describe_machine(),
        workload=describe(WORKLOAD, token_ids=False),
        repeat=3,
        limits=LIMITS,
        limits_missing="",
        servers=infos,
        points=collected.point_results(),
        knees=collected.knees(),
    )


def test_the_file_holds_all_of_it():
    written = results()
    read = msgspec.json.decode(written.encode(), type=Results)
    assert read == written
    raw = msgspec.json.decode(written.encode())
    assert raw["schema"] == 1
    assert raw["machine"]["cores"] > 0
    assert raw["versions"]["quire"]
    assert len(raw["points"]) == 3
    ours, theirs = raw["points"][0]["servers"]
    assert len(ours["rounds"]) == 3
    assert ours["ratios"] == theirs["shares"] == {}
    reads = [token_bytes(FACTS, 5.5) / (0.01 * slowness) / 1e6 for slowness in (1.0, 1.5, 1.2)]
    assert ours["shares"]["decode_read"] == {
        "median": pytest.approx(reads[2]),
        "min": pytest.approx(reads[1]),
        "max": pytest.approx(reads[0]),
    }
    for value in theirs["ratios"]["output_tok_s"].values():  # in every round, whatever its speed
        assert value == pytest.approx(0.18 / 0.12)
    assert raw["knees"]["quire"] == {"value": 2, "throughput": pytest.approx(3 / 0.072), "reached": True}


def test_keys_are_not_written():
    words = ["--api-key", "s3cret", "--rate", "1", "--api-key=s3cret", "--", "--api-key", "s3cret"]
    line = " ".join(command_line(words))
    assert line == "quire bench --api-key *** --rate 1 --api-key=*** -- --api-key ***"


def report(of: Results) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_report(of, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table():
    text = report(results())
    assert "4 in, 3 out; medians of 3" in text
    assert "1.50x (1.50-1.50)" in text
    assert "quire: saturates at c=2" in text
    assert "this machine at its best, 2 threads" in text
    assert "quire at c=1: " in text
    assert "of read bandwidth in decode" in text


def test_the_table_tells_what_went_wrong():
    failed = measure(
        Run(started=0.0, ended=1.0, records=[Record(due=0.0, ended=0.1, outcome="http_429", detail="full")])
    )
    bad = results()
    bad.points[0].servers[0].rounds[1] = failed
    text = report(msgspec.structs.replace(bad, limits=None, limits_missing="no compiler", knees={}))
    assert "quire at c=1: http_429: full" in text
    assert "shares of the machine: no compiler" in text
    assert "saturate" not in text
    assert "--token-ids" not in text
    rising = {"quire": Knee(value=4, throughput=9.0, reached=False)}
    assert "quire: not saturated up to c=4 (9 tok/s)" in report(msgspec.structs.replace(bad, knees=rising))


def test_tokens_without_a_chunk_are_told():
    few = results()
    rounds = few.points[1].servers[0].rounds
    rounds[:] = [replace(run, chunks=run.chunks // 2) for run in rounds]
    assert "quire at c=2: 9 chunks for 18 tokens" in report(few)
    workload = msgspec.structs.replace(few.workload, token_ids=True)
    assert "chunks for" not in report(msgspec.structs.replace(few, workload=workload))


def test_the_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from quire_bench.plot import draw

    path = tmp_path / "sweep.png"
    draw(results(), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 10_000


# -- the command


def test_bad_flags_and_absent_servers_are_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        command.run(["--help"])
    assert done.value.code == 0
    assert "--against URL[,NAME]" in capsys.readouterr().out
    assert command.run(["--rate", "0"]) == 2
    assert capsys.readouterr().err == "quire bench: argument --rate: expected a number above 0, got '0'\n"
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        assert command.run(["--url", f"http://127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_the_exit_code_tells_whether_all_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = results()

    async def measured(*_: object) -> Results:
        return found

    monkeypatch.setattr(command, "run_benchmark", measured)
    path = tmp_path / "r.json"
    assert command.run(["--json", str(path)]) == 0
    assert msgspec.json.decode(path.read_bytes(), type=Results) == found
    nothing = Run(started=0.0, ended=1.0, records=[Record(due=0.0, ended=0.1, outcome="unreachable")])
    found.points[2].servers[1].rounds[0] = measure(nothing)
    assert command.run([]) == 1
