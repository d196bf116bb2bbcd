"""`quire bench` as a command: it starts a server, measures it beside another one, and writes what it found."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest

from e2e.served import Served
from quire_bench.results import Results
from support.processes import inheriting

pytestmark = pytest.mark.e2e


MARK = "BENCH_RUN"


def bench(*argv: str, mark: str = "") -> subprocess.CompletedProcess[str]:
    """`mark`: a value that all it starts inherit, by which they are told from those of other tests."""
    command = [sys.executable, "-m", "quire_server.cli", "bench", *argv]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, MARK: mark}, check=False)


def test_our_own_server_a_peer_and_a_baseline(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mark = uuid.uuid4().hex
    with Served("--kv-memory", "32MiB") as peer:
        done = bench(
            *("--against", f"{peer.url},peer", "--baseline", "static", "--concurrency", "1,2,4", "--requests", "4"),
            *("--input", "16", "--output", "4-12", "--repeat", "2"),
            *("--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")),
            *("--", "--kv-memory", "32MiB", "--num-threads", "1"),
            mark=mark,
        )
        left = inheriting(MARK, mark)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert left == [], "what the command had started has outlived it"
    results = msgspec.json.decode((tmp_path / "r.json").read_bytes(), type=Results)
    assert [info.name for info in results.servers] == ["quire", "peer", "static"]
    for result in results.points:
        tokens = {tuple((run.input_tokens, run.output_tokens) for run in one.rounds) for one in result.servers}
        assert len(tokens) == 1  # the same work for all
        for one in result.servers:
            assert [run.errors for run in one.rounds] == [{}, {}]
            assert [run.wrong_length for run in one.rounds] == [0, 0]
        ours, _, static = result.servers
        assert [used.looked_up for used in ours.kv] == [run.input_tokens for run in ours.rounds]
        assert static.kv == []
    assert "blocks saved" in done.stdout
    quire = results.servers[0]
    assert quire.facts is not None
    assert quire.vocab_size == results.workload.vocab
    alone = results.points[0].servers[0].shares
    if results.limits:
        assert set(alone) >= {"arithmetic", "prefill"}  # the small model may fit in a cache
        for kind in ("arithmetic", "prefill"):
            assert 0 < alone[kind].min <= alone[kind].max < 1
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "output tok/s" in done.stdout


def test_an_open_loop_over_a_trace() -> None:
    sample = Path(__file__).parents[2] / "benchmarks/data/azure_conv_sample.csv"
    done = bench(
        *("--trace", str(sample), "--scale-len", "0.02", "--scale-rate", "20", "--requests", "12", "--repeat", "1"),
        *("--no-probe", "--", "--kv-memory", "32MiB"),
    )
    assert done.returncode == 0, done.stderr
    assert "a trace of 200 requests" in done.stdout
    assert "trace x20" in done.stdout
    assert "12 requests" in done.stderr


def test_a_server_that_does_not_start_is_one_clear_story() -> None:
    done = bench("--repeat", "1", "--", "/no/such/model")
    assert done.returncode == 1
    assert "there is no such directory" in done.stderr
    assert "Traceback" not in done.stderr
