"""`make gpu-first` goes on whatever becomes of a job, ends each by its limit, and takes up what is missing."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from gpu_first import __main__ as gpu_first
from gpu_first import capabilities, jobs, running
from gpu_first.jobs import Job, Part
from gpu_first.results import CRASHED, FAILED, HUNG, NO_TIME, NOT_HERE, PASSED, Results, passed_somewhere, recorded
from gpu_first.running import Run
from quire_kernels.optional_paths import NAMES
from support import gpu_run
from support.children import Children
from support.processes import lives

LONG = 600.0  # far beyond every limit here
HANG = f"import time; time.sleep({LONG})"


def _job(name: str, body: str, *, seconds: float = LONG, needs: tuple[str, ...] = ()) -> Job:
    return Job(name=name, command=("-c", body), seconds=seconds, needs=needs)


def _part(*work: Job, letter: str = "a", seconds: float = LONG) -> Part:
    return Part(letter=letter, title="work", seconds=seconds, jobs=work)


def _results(folder: Path, device: str = "a GPU") -> Results:
    return Results(folder, device=device, sources="1234")


def _run(results: Results, *parts: Part, seconds: float = LONG, again: bool = False) -> list[str]:
    told: list[str] = []
    Run(results, seconds=seconds, children=Children(), tell=told.append).all(parts, again=again)
    return told


def test_every_end_of_a_job_is_a_result_and_the_next_one_runs(tmp_path):
    work = {
        PASSED: _job("good", "print('all right')"),
        FAILED: _job("bad", "print('two differ'); raise SystemExit(3)"),
        CRASHED: _job("dead", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        HUNG: _job("stuck", HANG, seconds=0.3),
        NOT_HERE: _job("lacking", "", needs=("no_such_module",)),
    }
    part, last = _part(*work.values()), _part(_job("last", "print('still here')"), letter="b")
    results = _results(tmp_path)
    _run(results, part, last)
    assert {outcome: results.of(job).outcome for outcome, job in work.items()} == {each: each for each in work}
    lines = list(results.table([part, last]))
    assert [line.split()[0] for line in lines[1:-1] if line.startswith("    ")] == [
        *(j.name for j in work.values()),
        "last",
    ]
    for said in ("all right", "two differ", "SIGSEGV", "no no_such_module", "still here"):
        assert any(said in line for line in lines), said
    assert lines[-1] == "2 passed, 1 FAILED, 1 CRASHED, 1 HUNG, 1 not here"


def test_each_part_is_ended_at_its_limit_and_the_table_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_LEAST_SECONDS", 0.1)
    parts = [_part(*(_job(f"{letter}{i}", HANG) for i in range(2)), letter=letter, seconds=0.3) for letter in "abc"]
    results = _results(tmp_path)
    started = time.monotonic()
    _run(results, *parts, seconds=1.0)
    assert time.monotonic() - started < 100
    found = list(results.table(parts))
    assert [line.split()[0] for line in found[:-1]] == ["(a)", "a0", "a1", "(b)", "b0", "b1", "(c)", "c0", "c1"]
    assert found[-1] == f"6 {NO_TIME}"


def test_a_second_run_takes_up_what_is_missing_and_again_what_did_not_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_LEAST_SECONDS", 0.1)
    count = "import pathlib; p = pathlib.Path({!r}); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    good, bad = tmp_path / "good", tmp_path / "bad"
    wait = f"time.sleep(0 if pathlib.Path({str(tmp_path / 'now')!r}).exists() else {LONG})"
    work = _part(_job("good", count.format(str(good))), _job("bad", count.format(str(bad)) + "; raise SystemExit(1)"))
    late = _job("late", f"import pathlib, time; {wait}")
    _run(_results(tmp_path / "results"), work, _part(late, letter="b", seconds=0.3))
    assert _results(tmp_path / "results").of(late).outcome == NO_TIME
    (tmp_path / "now").touch()
    both = (work, _part(late, letter="b"))
    _run(results := _results(tmp_path / "results"), *both)
    assert results.of(late).outcome == PASSED
    assert (good.read_text(), bad.read_text()) == ("x", "x")
    _run(results, *both, again=True)
    assert (good.read_text(), bad.read_text()) == ("x", "xx")
    assert [results.passed(part) for part in both] == [False, True]
    assert _results(tmp_path / "results", "another GPU").is_missing(late)


def test_a_job_s_own_numbers_are_kept_and_the_end_of_what_failed(tmp_path):
    write = "import json, sys; json.dump({'ms': 3}, open(sys.argv[1], 'w')); print('why'); raise SystemExit(1)"
    part = _part(Job(name="bench", command=("-c", write, jobs.FACTS), seconds=LONG))
    _run(_results(tmp_path), part)
    (kept,) = json.loads((tmp_path / "gpu-first.json").read_text())["results"]
    assert (kept["facts"], kept["output"], kept["device"], kept["sources"]) == ({"ms": 3}, "why\n", "a GPU", "1234")


def test_what_a_killed_job_started_in_a_session_of_its_own_is_killed_too(tmp_path):
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep({LONG})"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    children, output = Children(), tmp_path / "output"
    command = [sys.executable, "-c", start]
    seconds = 0.2
    while not pid.exists() or not pid.read_text():  # a slow machine starts the two later
        seconds *= 2
        ended = children.run(command, seconds=seconds, cwd=tmp_path, environment=os.environ, output=output)
        assert ended.code is None
    assert not lives(int(pid.read_text()))


@pytest.mark.parametrize("device", [jobs.CUDA, jobs.SIMULATED])
def test_the_plan_has_all_parts_in_ten_minutes_and_every_test_file(device):
    parts = jobs.parts(device, passed_somewhere(recorded()))
    assert "".join(part.letter for part in parts) == "abcdefghij"
    assert sum(part.seconds for part in parts) <= gpu_first.SECONDS < 600
    names = [job.name for part in parts for job in part.jobs]
    assert len(names) == len(set(names))
    assert {job.name for job in parts[1].jobs} == {job.name for job in gpu_run.jobs()}
    assert all(job.seconds <= part.seconds for part in parts for job in part.jobs)


def test_files_that_ran_on_a_gpu_come_after_those_that_did_not():
    seen = {job.name for job in gpu_run.jobs()[::2]}
    order = [job.name in seen for job in jobs.parts(jobs.CUDA, seen)[1].jobs]
    assert order == sorted(order)


def test_without_a_gpu_it_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_first, "device_name", lambda: ("", "torch finds no usable GPU"))
    assert gpu_first.main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "gpu-first: torch finds no usable GPU\n"


def test_the_documents_say_of_each_capability_when_it_ran():
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    head = "| capability | last run, with the code of that day |\n| --- | --- |\n"
    rows = text.partition(head)[2].partition("\n\n")[0].splitlines()
    assert rows == capabilities.table(recorded())
    known = {job.name for part in jobs.parts(jobs.CUDA) for job in part.jobs}
    assert {job for needed in capabilities.CAPABILITIES.values() for job in needed} <= known
    assert {result.job for result in recorded()} <= known


def test_the_documents_say_of_each_optional_path_when_it_passed_its_checks():
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)`: .* \| .* \| (.*) \|$", text, re.MULTILINE)
    assert rows == [(name, capabilities.path_shown(name, recorded())) for name in NAMES]
    assert capabilities.PATHS_JOB in {job.name for part in jobs.parts(jobs.CUDA) for job in part.jobs}


def test_a_path_has_passed_where_its_own_checks_did_whatever_became_of_others(tmp_path):
    write = "import json, sys; json.dump({'paths': {'graphs': '', 'fp8-cache': 'off by 3'}}, open(sys.argv[1], 'w'))"
    job = Job(name=capabilities.PATHS_JOB, command=("-c", write + "; sys.exit(1)", jobs.FACTS), seconds=LONG)
    results = _results(tmp_path, "A GPU, 1")
    _run(results, _part(job))
    found = [results.of(job)]
    ran = [capabilities.path_shown(name, found) for name in ("graphs", "fp8-cache", "decode-chain")]
    assert ran == [f"{found[0].started[:10]}, A GPU", capabilities.NOT_RUN, capabilities.NOT_RUN]


def test_a_capability_has_run_where_all_of_its_jobs_passed_on_one_device(tmp_path):
    part = _part(_job("one", ""), _job("two", ""))
    for device, outcome in (("A, 1", "pass"), ("B, 2", "raise SystemExit(1)")):
        results = _results(tmp_path / device, device)
        _run(results, _part(_job("one", ""), _job("two", outcome)))
        found = [results.of(job) for job in part.jobs]
        ran = capabilities.shown(["one", "two"], found)
        assert ran == (f"{found[0].started[:10]}, A" if outcome == "pass" else capabilities.NOT_RUN)
    assert capabilities.shown(["one"], found) != capabilities.NOT_RUN
    assert capabilities.shown([], found) == capabilities.NOT_RUN
