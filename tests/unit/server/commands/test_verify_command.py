"""`quire verify` from outside: the table, the JSON, exit codes, one clear line for what cannot be."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from quire_engine.contract.errors import ConfigError, EngineDead
from quire_server.commands import verify
from quire_server.commands.verify import Check, Greedy, Report
from quire_server.engine import json_child

MACHINE: dict[str, Any] = {
    "processor": "Some CPU",
    "cores": 2,
    "gpus": [],
    "gpu_driver": None,
    "why_no_gpu": None,
}


def check(op: str, *, ok: bool = True, **changes: Any) -> Check:
    plain: dict[str, Any] = {
        "kernels": "cpu",
        "dtype": "bfloat16",
        "weights": "auto",
        "kv": "auto",
        "case": "8 rows",
        "share": 0.25,
        "alone": True,
        "problem": "" if ok else "3 numbers [of 8] are wrong",
        "fatal": False,
    }
    return Check(op=op, ok=ok, **{**plain, **changes})


def report(*checks: Check, **changes: Any) -> Report:
    greedy = Greedy(ok=True, kernels="cpu", num_tokens=10, num_equal=10, problem="")
    plain: dict[str, Any] = {
        "ok": all(one.ok for one in checks),
        "when": "2026-01-01T00:00:00+00:00",
        "seconds": 3.5,
        "device": "cpu",
        "deterministic": False,
        "model": "quire-demo",
        "machine": MACHINE,
        "checks": list(checks),
        "greedy": greedy,
    }
    return Report(**{**plain, **changes})


def printed(given: Report) -> str:
    text = io.StringIO()
    verify.print_report(given, Console(file=text, width=200))
    return text.getvalue()


def test_a_row_for_each_op_of_each_format():
    text = printed(
        report(
            check("attention", share=0.5),
            check("attention", share=0.75, alone=None),
            check("logits", weights="int8", kv="int8", alone=False),
        )
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["cpu, bfloat16", "attention", "2", "0.75", "same", "ok"],
        ["cpu, bfloat16, int8 weights, int8 KV", "logits", "1", "0.25", "differs", "ok"],
        ["cpu", "greedy answers of quire-demo", "tokens", "10 of 10", "", "ok"],
    ]
    assert "all is as it should be: 3 checks on Some CPU, 2 cores in 3.5 s" in text
    assert "FAILED" not in text


def test_what_is_wrong_is_named_and_not_taken_for_markup():
    failed = [check("attention", ok=False, case=f"{n} rows") for n in range(30)]
    greedy = Greedy(ok=False, kernels="", num_tokens=0, num_equal=0, problem="did not run: [why]")
    text = printed(report(*failed, greedy=greedy))
    assert text.count("FAILED cpu, bfloat16: attention, ") == verify.MOST_PROBLEMS
    assert "attention, 3 rows: 3 numbers [of 8] are wrong" in text
    assert "and 10 more failures; --json FILE has all" in text
    assert "FAILED the embedded model: did not run: [why]" in text
    assert "this machine does not compute what it should: 30 checks" in text


def test_the_gpu_is_named_and_why_there_is_none():
    gpu = {"name": "NVIDIA X", "capability": "9.0", "memory": 1, "multiprocessors": 2}
    text = printed(report(check("embed"), device="cuda", machine={**MACHINE, "gpus": [gpu], "gpu_driver": "580.1"}))
    assert "on NVIDIA X (9.0, driver 580.1)" in text
    text = printed(report(check("embed"), machine={**MACHINE, "why_no_gpu": "there is an NVIDIA GPU, but no luck"}))
    assert "no GPU was used: there is an NVIDIA GPU, but no luck" in text


@dataclass
class Asked:
    """Stands for the checking process."""

    answer: Any
    question: Any = None

    def __call__(self, tool: str, question: Any, reply_type: type[Report], *, timeout: float) -> list[Report]:
        assert (tool, reply_type, timeout) == ("verify", Report, verify.LONGEST)
        self.question = question
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer]


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_and_the_file_tell_the_same(ok, code, monkeypatch, tmp_path, capsys):
    asked = Asked(report(check("embed", ok=ok)))
    monkeypatch.setattr(verify, "ask", asked)
    file = tmp_path / "report.json"
    assert verify.run(["--device", "cpu", "--kernels", "reference", "--num-threads", "2", "--json", str(file)]) == code
    assert asked.question == {
        "device": "cpu",
        "kernels": "reference",
        "deterministic": False,
        "model": None,
        "num_threads": 2,
        "patience": verify.PATIENCE,
    }
    written = json.loads(file.read_text())
    assert written["ok"] is ok
    assert written["checks"][0]["op"] == "embed"
    assert written["machine"] == MACHINE
    assert "Some CPU" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ConfigError("set device to cpu"), EngineDead("the verify process ended early")])
def test_what_cannot_be_checked_is_one_line(error, monkeypatch, capsys):
    monkeypatch.setattr(verify, "ask", Asked(error))
    assert verify.run([]) == 1
    assert capsys.readouterr().err == f"quire verify: {error}\n"


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--model", "/nowhere/at-all"], 1, "no such directory"),
        (["--device", "tpu"], 2, "tpu"),
        (["--num-threads", "0"], 2, "whole number"),
        (["--json", "/nowhere/at/all.json"], 2, "no such directory"),
    ],
)
def test_what_cannot_be(argv, code, said, capsys):
    try:
        found = verify.run(argv)
    except SystemExit as stop:
        found = stop.code
    captured = capsys.readouterr()
    assert found == code
    assert said in captured.err
    assert captured.err.startswith("quire verify: ")
    assert len(captured.err.splitlines()) == 1


def test_a_process_that_does_not_end_is_ended(monkeypatch):
    def run(*_, timeout, **__):
        raise subprocess.TimeoutExpired("verify", timeout)

    monkeypatch.setattr(json_child.subprocess, "run", run)
    with pytest.raises(EngineDead, match=r"the verify process did not end within 0\.5 seconds"):
        json_child.ask("verify", {}, Report, timeout=0.5)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_this_machine(tmp_path):
    """The real process, with the set that takes the least time."""
    file, words = tmp_path / "report.json", "--device cpu --kernels reference --num-threads 1 --json"
    done = subprocess.run(
        [sys.executable, "-m", "quire_server.cli", "verify", *words.split(), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is as it should be" in done.stdout
    written = json.loads(file.read_text())
    assert {one["kernels"] for one in written["checks"]} == {"reference"}
    assert {one["op"] for one in written["checks"]} >= {"embed", "norm_linear", "rope_write", "attention", "logits"}
    assert written["greedy"]["num_equal"] == written["greedy"]["num_tokens"] > 500
    assert written["machine"]["versions"]["torch"]
