"""`make gpu-test` runs all that needs a GPU, ends in time, and says what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import gpu_run
from support.covering import few
from support.gpu_run import Job

ROOT = Path(__file__).parents[2]


def test_files_with_tests_for_a_gpu_are_found():
    found = gpu_run.marked()
    assert {
        "tests/kernels/test_attention.py",
        "tests/model/test_build.py",
        "tests/unit/engine/execution/test_sampler.py",
    } <= {*found}
    assert gpu_run.jobs()[0].name == gpu_run.LONGEST
    assert gpu_run.LAUNCHER not in found
    assert "tests/unit/engine/scheduling/test_scheduler.py" not in found


@pytest.mark.parametrize(
    ("line", "marks"),
    [
        ("@pytest.mark.gpu", True),
        ("pytestmark = [pytest.mark.gpu]", True),
        ("from support.model_steps import DEVICES, Model", True),
        ("from support.model_steps import (\n    CPU,\n    CUDA,\n)", True),
        ("from support.model_steps import CPU, Model", False),
        ("DEVICES = 3", False),
    ],
)
def test_what_marks_a_file(line, marks):
    assert bool(gpu_run._MARK.search(f"import torch\n{line}\n")) is marks


def test_every_file_of_the_kernels_is_run_on_the_device_but_planted_bugs_are_not():
    work = {job.name: job for job in gpu_run.jobs()}
    files = {path.name for path in (ROOT / gpu_run.TRITON_FOLDER).glob("test_*.py")} - set(gpu_run.NOT_ON_A_GPU)
    for name in files:
        job = work[f"{gpu_run.TRITON_FOLDER}/{name}"]
        assert job.environment["QUIRE_TRITON_DEVICE"] == "cuda"
        assert job.arguments[1:] == ("-k", "not planted")
    assert len(work) == len(files) + len(gpu_run.marked())


def _job(tmp_path: Path, name: str, body: str) -> Job:
    path = tmp_path / f"test_{name}.py"
    path.write_text(f"import time\ndef test_it():\n    {body}\n")
    return Job(name=name, arguments=(str(path), "-c", "/dev/null", "--rootdir", str(tmp_path)))


def test_outcomes(tmp_path, capsys):
    work = [_job(tmp_path, "good", "pass"), _job(tmp_path, "bad", "assert 1 == 2")]
    good, bad = gpu_run.run(work, seconds=60, at_once=2)
    assert (good.code, bad.code) == (0, 1)
    assert "assert 1 == 2" in bad.output
    printed = capsys.readouterr().out
    assert re.search(r"passed +good  1 passed in", printed)
    assert re.search(r"FAILED \(1\) +bad  1 failed in", printed)


def test_what_takes_too_long_is_ended_and_named(tmp_path, capsys):
    work = [_job(tmp_path, "long", "time.sleep(300)"), _job(tmp_path, "late", "pass")]
    outcomes = gpu_run.run(work, seconds=0.5, at_once=1)
    assert [outcome.code for outcome in outcomes] == [None, None]
    assert outcomes[0].seconds < 120
    assert capsys.readouterr().out.count("NOT FINISHED") == 2


@pytest.mark.parametrize(
    ("body", "code"), few([("pass", 0), ("assert 1 == 2", 1), ("time.sleep(300)", 1)], ("assert 1 == 2", 1))
)
def test_the_exit_code_is_the_worst(body, code, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_run, "why_not", lambda: None)
    monkeypatch.setattr(gpu_run, "describe", lambda: "a GPU")
    monkeypatch.setattr(gpu_run, "jobs", lambda: [_job(tmp_path, "one", body)])
    if "sleep" in body:
        monkeypatch.setattr(gpu_run, "SECONDS", 3.0)
    assert gpu_run.main() == code


def test_a_machine_that_cannot_is_told_in_a_line(monkeypatch, capsys):
    assert gpu_run.missing(("json", "no_such_module", "nor_this")) == ["no_such_module", "nor_this"]
    monkeypatch.setattr(gpu_run, "missing", lambda: ["triton"])
    assert gpu_run.main() == 2
    assert capsys.readouterr().err.endswith(" has no triton\n")
