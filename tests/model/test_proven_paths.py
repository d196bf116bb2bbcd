"""Optional paths of a GPU's kernels with planted faults: what fails is left out, named once, and plain paths serve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from quire_engine.contract.config import EngineConfig, engine_config
from quire_engine.contract.plan import for_later_engines
from quire_engine.execution import proven_paths, prover_process
from quire_engine.execution.models.found import find_model
from quire_engine.execution.proven_paths import asked_paths, may_be_asked, shown_here, without_paths
from quire_engine.execution.prover_process import ProverProcess, Stuck
from quire_engine.execution.verdict import Verdict, verdict_of
from quire_engine.tools.prover import ahead
from quire_engine.tools.prover.ahead import prover_ahead
from quire_engine.tools.prover.workers import Broken, Patience, Watch, prove
from quire_kernels.optional_paths import (
    DECODE_CHAIN,
    DEPENDENT_LAUNCH,
    FP8_CACHE,
    FUSED_GATE_UP,
    GRAPHS,
    NAMES,
    PACKED_WEIGHTS,
    PATHS,
    UNMASKED_PROMPTS,
)
from quire_kernels.verify.paths import _CHECKS
from support.both_runners import Both
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.exposition import PLAN
from support.model_steps import random_ids
from support.plans import changed

TESTS = Path(__file__).parents[1]
KINDS = {
    "wrong": ("wrong", "off by", "differ"),
    "exception": ("raised RuntimeError: planted",),
    "signal": ("ended by SIGSEGV",),
    "hang": ("did not come back within 3 seconds",),
    "memory": ("raised OutOfMemoryError: CUDA out of memory",),
}
HOPPER = {"name": "a GPU", "capability": (9, 0)}


def simulated(what: str, home: Path, *faults: dict[str, str]):
    """The JSON that a program prints on a GPU that is not there."""
    command = [sys.executable, "-m", "support.simulated_paths", what, *map(json.dumps, faults)]
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run(command, check=False, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("first", few(range(len(KINDS)), 0))
def test_each_fault_of_each_path_is_that_paths_problem_alone(first, tmp_path):
    """Each path with one kind, beginning with the `first`, so that all rows are each path with each kind."""
    kinds = [*KINDS, *KINDS][first : first + len(KINDS)]
    faults = dict(zip(NAMES, cycle(kinds), strict=False))
    assert set(faults.values()) == set(KINDS)
    found = simulated("each", tmp_path, faults)
    assert found.keys() == faults.keys()
    for path, kind in faults.items():
        problem, ops, others = found[path]
        assert any(word in problem for word in KINDS[kind]), (path, kind, problem)
        assert not ops
        assert {name for name, _ in others} == set(NAMES) - {path}
        assert not any(text for _, text in others), "they are shown"


@pytest.mark.matrix  # faults of each path are found beside it
def test_a_start_serves_the_plain_bits_and_the_next_one_asks_nothing(tmp_path):
    faults = {
        FP8_CACHE: "wrong",
        UNMASKED_PROMPTS: "signal",
        FUSED_GATE_UP: "hang",
        DECODE_CHAIN: "exception",
        GRAPHS: "wrong",
    }
    first, second = simulated("serve", tmp_path, faults)
    left_out = [name for name in NAMES if name in faults or name == DEPENDENT_LAUNCH]
    assert first["same"], "the tokens and log-probabilities of the reference"
    assert first["kv"] == "auto"
    for start in (first, second):
        assert start["left_out"] == left_out
        assert start["replaced"] == []
        assert [line.split()[3] for line in start["said"]] == left_out, "one line each"
        assert start["children"] == 1
    plain = {path.name: path.plain for path in PATHS}
    for line, name in zip(first["said"], left_out, strict=True):
        assert line.startswith(f"the optional path {name} is left out on this GPU, instead: {plain[name]} (")
    assert "it takes decode-chain, which is left out" in first["said"][left_out.index(DEPENDENT_LAUNCH)]
    stored = list((tmp_path / ".cache" / "quire" / "gpu-paths").iterdir())
    assert len(stored) == 1
    assert verdict_of(json.loads(stored[0].read_text())).is_complete


def test_each_path_has_checks_and_is_told_by_name():
    assert tuple(_CHECKS) == NAMES or set(_CHECKS) == set(NAMES)
    order = {name: number for number, name in enumerate(NAMES)}
    assert all(order[path.needs] < order[path.name] for path in PATHS if path.needs)


def test_settings_go_with_the_path_they_ask_for():
    config = EngineConfig(model="/m", quantization="int4", kv_cache_dtype="fp8", attention="flash-attn")
    assert asked_paths(config) == NAMES[:3]
    assert without_paths(config) == config
    left = without_paths(replace(config, left_out_paths=NAMES))
    assert (left.quantization, left.kv_cache_dtype, left.attention) == (None, "auto", "auto")
    assert asked_paths(left) == ()
    some = without_paths(replace(config, left_out_paths=(FP8_CACHE,)))
    assert asked_paths(some) == (PACKED_WEIGHTS, NAMES[2])
    own = replace(config, kv_cache_dtype="int8", attention="triton", left_out_paths=NAMES)
    assert (without_paths(own).kv_cache_dtype, without_paths(own).attention) == ("int8", "triton")


def test_ranks_and_later_engines_take_the_same_paths():
    config = EngineConfig(model="/m")
    assert engine_config(asdict(config)).left_out_paths is None
    later = for_later_engines(config, changed(PLAN, machine={"left_out_paths": (GRAPHS,)}))
    assert later.left_out_paths == (GRAPHS,)
    assert engine_config(json.loads(json.dumps(asdict(later)))) == later


def test_what_may_pass_is_not_kept():
    found = Verdict(
        ops={"attention": "1 rows: raised OutOfMemoryError: CUDA"},
        ops_checked=True,
        possible=(GRAPHS, DECODE_CHAIN),
        paths={GRAPHS: "ended by SIGKILL", DECODE_CHAIN: "ended by SIGSEGV"},
    )
    assert found.is_complete
    kept = found.lasting
    assert (kept.ops, kept.paths) == ({}, {DECODE_CHAIN: "ended by SIGSEGV"})
    assert not kept.ops_checked
    assert not kept.is_complete
    assert verdict_of(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize("wrong", [{}, {"possible": 3}, {"possible": [1]}, {"possible": [], "ops": []}, {"x": 1}])
def test_other_files_are_no_verdicts(wrong):
    with pytest.raises(ValueError, match="no verdict"):
        verdict_of(wrong)


def lines(*said: dict) -> tuple[int, int]:
    """A worker that has said this and ended: its pid and its pipe."""
    reader, writer = os.pipe()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    os.write(writer, b"".join(json.dumps(each).encode() + b"\n" for each in said))
    os.close(writer)
    return pid, reader


def test_after_its_time_no_path_is_begun_that_was_not_asked_for(monkeypatch):
    def watch(asked, budget):
        verdict = Verdict(possible=(FP8_CACHE, GRAPHS))
        watched = Watch(verdict, Patience(budget=budget), frozenset(asked), lambda *_: True)
        said = ({"running": [GRAPHS, "op", "case"]}, {"path": [GRAPHS, ""]}, {"running": [FP8_CACHE, "op", "case"]})
        return watched.follow(*lines(*said)), verdict.paths

    assert watch((), -1.0) == (True, {GRAPHS: ""})
    ended = {GRAPHS: "", FP8_CACHE: "op, case: ended with exit code 0"}
    assert watch((), 100.0) == (False, ended)
    assert watch((FP8_CACHE,), -1.0) == (True, ended)


def test_a_worker_that_ends_before_its_first_check_has_no_verdict():
    watched = Watch(Verdict(), Patience(), frozenset(), lambda *_: True)
    with pytest.raises(Broken, match="ended with exit code 0"):
        watched.follow(*lines())
    with pytest.raises(Broken, match="no driver"):
        watched.follow(*lines({"broken": "no driver"}))


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU whose checks are answered by what is set here; how often it was asked."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: HOPPER["name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER["capability"])
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = []

    def ask(config, dtype, verdict, tell, prover):
        asked.append(verdict)
        return Verdict(ops_checked=True, possible=(DECODE_CHAIN, GRAPHS), paths={DECODE_CHAIN: "", GRAPHS: "wrong"})

    monkeypatch.setattr(proven_paths, "_ask", ask)
    return asked


def shown(**changes):
    config = EngineConfig(model=str(shared_checkpoint()), **changes)
    given = config, find_model(config), torch.device("cuda"), torch.bfloat16, lambda *_: None
    return shown_here(*given).config.left_out_paths


def test_a_verdict_holds_for_its_device_versions_and_settings(gpu, monkeypatch):
    left_out = tuple(name for name in NAMES if name != DECODE_CHAIN)
    for _ in range(2):
        assert shown() == left_out
    assert len(gpu) == 1
    for number, change in enumerate(
        (
            lambda: shown(deterministic=True),
            lambda: monkeypatch.setattr(proven_paths, "gpu_driver", lambda: "999.1") or shown(),
            lambda: monkeypatch.setattr(torch, "__version__", "99.0") or shown(),
            lambda: monkeypatch.setattr(proven_paths, "_triton", lambda: "99.0") or shown(),
            lambda: monkeypatch.setattr(proven_paths, "_kernels_hash", lambda: "other") or shown(),
            lambda: monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another GPU") or shown(),
        ),
        start=2,
    ):
        assert change() == left_out
        assert len(gpu) == number


def test_who_trusts_its_gpu_is_asked_nothing(gpu):
    assert shown(trust_gpu_paths=True) == ()
    assert shown(kernels="reference") == ()
    assert shown(left_out_paths=(GRAPHS,)) == (GRAPHS,), "as the engine before"
    assert len(gpu) == 1


def test_without_a_verdict_what_was_asked_for_stays(gpu, monkeypatch):
    def ask(*_):
        raise proven_paths._NoVerdict("no process")

    monkeypatch.setattr(proven_paths, "_ask", ask)
    assert shown(quantization="int8") == tuple(name for name in NAMES if name != PACKED_WEIGHTS)


def say_what_is_open() -> int:
    """The question, and the descriptors of this process."""
    question = sys.stdin.readline()
    found = [number for number in range(100) if Path(f"/proc/self/fd/{number}").exists()]
    os.write(1, json.dumps([question, found]).encode())
    return 7


def started(way: str, code: str = "") -> ProverProcess:
    if way == "forked":
        return ProverProcess.forked(say_what_is_open)
    return ProverProcess.launched([sys.executable, "-c", code or SAYS])


SAYS = "import json, sys; print(json.dumps([sys.stdin.readline(), [0, 1, 2]])); sys.exit(7)"


@pytest.mark.parametrize("way", ["forked", "launched"])
def test_a_prover_answers_once_and_has_nothing_of_its_parent(way):
    signs = []
    process = started(way)
    reply, code = process.ask(b"what?\n", go_on=lambda: signs.append(1), every=300.0, longest=600.0)
    assert (json.loads(reply), code, signs) == (["what?\n", [0, 1, 2]], 7, [1])
    process.dismiss()  # which has nothing left to do


@pytest.mark.parametrize("way", ["forked", "launched"])
def test_a_prover_that_is_asked_nothing_ends(way):
    process = started(way)
    process.dismiss()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


SLEEPS = "import time; time.sleep(1000)"


def test_a_prover_that_is_stuck_is_killed():
    process = started("launched", SLEEPS)
    with pytest.raises(Stuck, match="did not end within"):
        process.ask(b"?\n", go_on=lambda: None, every=0.01, longest=0.05)
    assert_ended(process)


def test_a_prover_gives_signs_of_life():
    signs = []

    def go_on() -> None:
        signs.append(1)
        if len(signs) == 3:
            os.kill(process.pid, signal.SIGKILL)

    process = started("launched", SLEEPS)
    assert process.ask(b"?\n", go_on=go_on, every=0.01, longest=600.0) == (b"", -signal.SIGKILL)
    assert len(signs) >= 3


def test_a_prover_ends_with_whoever_waits_for_it():
    """A start whose parent has gone cannot say that it goes on."""

    def go_on() -> None:
        raise BrokenPipeError

    process = started("launched", SLEEPS)
    with pytest.raises(BrokenPipeError):
        process.ask(b"?\n", go_on=go_on, every=300.0, longest=600.0)
    assert_ended(process)


def test_a_prover_that_says_all_and_stays_is_ended(monkeypatch):
    monkeypatch.setattr(prover_process, "ENDING", 0.05)
    process = started("launched", f"import os; os.write(1, b'all'); os.close(1); {SLEEPS}")
    assert process.ask(b"?\n", go_on=lambda: None, every=300.0, longest=600.0) == (b"all", -signal.SIGKILL)
    assert_ended(process)


def assert_ended(process: ProverProcess) -> None:
    before = os.listdir("/proc/self/fd")
    process.dismiss()
    assert os.listdir("/proc/self/fd") == before, "nothing is closed twice"
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_start_goes_on_where_no_prover_can_be_forked(monkeypatch):
    def fork() -> int:
        raise OSError("no memory")

    monkeypatch.setattr(ahead, "may_be_asked", lambda _: True)
    monkeypatch.setattr(os, "fork", fork)
    before = os.listdir("/proc/self/fd")
    with prover_ahead(EngineConfig(model="/m")) as prover:
        assert prover is None
    assert os.listdir("/proc/self/fd") == before


def test_a_prover_that_cannot_start_is_an_error_of_the_system():
    with pytest.raises(FileNotFoundError):
        ProverProcess.launched(["/no/such/program"])


def test_a_prover_is_forked_only_where_a_start_may_ask_one(monkeypatch):
    config = EngineConfig(model="/m", device="auto")
    monkeypatch.setattr(proven_paths, "gpu_driver", lambda: "")
    assert not may_be_asked(config), "no NVIDIA driver is loaded"
    monkeypatch.setattr(proven_paths, "gpu_driver", lambda: "580.1")
    assert may_be_asked(config)
    for left in (
        {"device": "cpu"},
        {"trust_gpu_paths": True},
        {"kernels": "reference"},
        {"left_out_paths": ()},  # as the engine before has found
    ):
        assert not may_be_asked(replace(config, **left)), left


def test_without_graphs_steps_have_the_same_results():
    both = Both(seed=7, graphs=False)
    both.story.add(0, random_ids(14, 0), 6)
    both.story.add(1, random_ids(3, 1), 5, temperature=0.9, seed=4)
    both.story.run()
    both.executor.capture_graphs()
    both.check()
    assert both.device.captures == 0


def test_no_time_is_lost_where_nothing_is_wrong():
    """A worker that says its last line is not waited for."""
    verdict = Verdict(ops_checked=True, possible=())
    prove(lambda _, say: say({"done": True}), verdict, Patience())
    assert verdict.is_complete
