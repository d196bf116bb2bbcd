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
from quire_bench.compare import Knee
from quire_bench.limits import shares, token_bytes
from quire_bench.measures import measure
from quire_bench.records import Record, Run
from quire_bench.report import print_report
from quire_bench.results import SCHEMA, Collected, Results, command_line, describe, describe_machine, versions
from quire_bench.servers import ServerInfo, read_kv_use
from quire_bench.workload import LoadPoint
from quire_server.metrics.metrics import Metrics
from support.bench_runs import FACTS, LIMITS, WORKLOAD, run_with
from support.exposition import PLAN, busy, without_aliases

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
        limits={"cpu": LIMITS},
        limits_missing={},
        servers=infos,
        points=collected.point_results(),
        knees=collected.knees(),
    )


def test_the_file_holds_all_of_it():
    written = results()
    read = msgspec.json.decode(written.encode(), type=Results)
    assert read == written
    raw = msgspec.json.decode(written.encode())
    assert raw["schema"] == SCHEMA
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


def test_what_sharing_saved_and_preemptions_cost_is_the_growth_in_the_run():
    """Read off a Quire server's own exposition; the second round's look is after a restart and does not count."""
    metrics = Metrics("m")
    metrics.observe_plan(PLAN)
    totals = {
        **{"total_prefix_query_tokens": 1000, "total_prefix_hit_tokens": 400, "total_blocks_taken": 70},
        **{"total_preemptions": 3, "total_recomputed_tokens": 90},
    }
    metrics.observe_step(busy(**totals))
    before = read_kv_use(metrics.render().decode())
    metrics.observe_step(busy(**{name: 3 * total for name, total in totals.items()}))
    after = read_kv_use(metrics.render().decode())
    assert before is not None
    assert after is not None
    used = after.since(before)
    assert used is not None
    assert (used.looked_up, used.found, used.blocks_saved, used.blocks_taken) == (2000, 800, 800 // 16, 140)
    assert (used.recomputed, used.preemptions) == (180, 6)
    assert before.since(after) is None
    assert read_kv_use(without_aliases(metrics.render()).decode().replace("quire_recomputed", "older")) is None
    told = results()
    told.points[0].servers[0].kv.extend([used, used])
    text = report(told)
    assert (
        "quire at c=1: 1,600 of 4,000 prompt tokens (40%) were cached, 100 blocks saved and 280 taken; 360 of" in text
    )
    assert "were recomputed after 12 preemptions" in text
    assert "quire at c=2: 1,600" not in text
    raw = msgspec.json.decode(told.encode())["points"][0]["servers"][0]["kv"]
    assert raw[0]["found"] == 800


def test_the_table_tells_what_went_wrong():
    failed = measure(
        Run(started=0.0, ended=1.0, records=[Record(due=0.0, ended=0.1, outcome="http_429", detail="full")])
    )
    bad = results()
    bad.points[0].servers[0].rounds[1] = failed
    text = report(msgspec.structs.replace(bad, limits={}, limits_missing={"quire": "no compiler"}, knees={}))
    assert "quire at c=1: http_429: full" in text
    assert "quire: shares of the machine unknown: no compiler" in text
    assert "at its best" not in text
    assert "saturate" not in text
    assert "--token-ids" not in text
    rising = {"quire": Knee(value=4, throughput=9.0, reached=False)}
    assert "quire: not saturated up to c=4 (9 tok/s)" in report(msgspec.structs.replace(bad, knees=rising))


def test_the_limits_are_the_devices():
    gpu = msgspec.structs.replace(LIMITS, variant="GPU 9", threads=132, int8_per_second=0.0, fp16_per_second=7e12)
    both = msgspec.structs.replace(
        results(), limits={"cpu": LIMITS, "cuda": gpu}, limits_missing={"a": "far", "b": "far", "c": "no GPU"}
    )
    text = report(both)
    assert "this machine at its best, 2 threads: bf16 0 G/s" in text
    named = msgspec.structs.replace(LIMITS, bf16_instruction="TDPBF16PS", bf16_per_second=2e12)
    told = report(msgspec.structs.replace(results(), limits={"cpu": named}))
    assert "2 threads: bf16 2,000 G/s (TDPBF16PS), int8 0 G/s, fp32" in told
    assert "of the peak of TDPBF16PS, " in told
    assert "GPU 9 at its best, 132 multiprocessors: bf16 0 G/s, fp16 7,000 G/s, fp32" in text
    assert "a, b: shares of the machine unknown: far\nc: shares of the machine unknown: no GPU" in text


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
