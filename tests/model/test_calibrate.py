"""`quire calibrate`: steps of the engine that serves, measured, fitted and written for a simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire_bench.traces import TraceRow
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.cost_model import read_cost
from quire_engine.demo import demo_model_path
from quire_lab.commands import calibrate as command
from quire_lab.simulation.setup import setup
from quire_lab.simulation.simulator import simulate
from quire_lab.tools.calibrate import calibrate


@pytest.fixture(scope="module")
def calibration() -> dict[str, object]:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk=64)
    config = EngineConfig(model=str(demo_model_path()), limits=limits, max_model_len=256, num_threads=1, device="cpu")
    for seconds in (0.3, 3.0, 30.0, 120.0):  # a busy machine needs more of them for enough steps
        try:
            return calibrate(config, seconds)
        except ConfigError as error:
            if "measure for longer" not in str(error):
                raise
    pytest.fail("two minutes gave too few steps")


def test_a_calibration_is_a_server_to_simulate(calibration: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(calibration))
    cost, plain = read_cost(str(path))
    assert cost.decode_seconds(1, 10) > 0
    assert cost.prompt[-1][0] <= 64
    assert cost.prompt_seconds(64) > cost.prompt_seconds(1)
    asked = setup(plain, cost)
    assert asked.scheduler.limits.max_num_seqs == 4
    assert asked.scheduler.max_model_len == 256
    outcome = simulate(asked, [TraceRow(at=0.0, input_tokens=50, output_tokens=8)])
    assert outcome.done[0].num_tokens == 8


def test_the_origin_tells_model_and_machine(calibration: dict[str, object]) -> None:
    cost = calibration["cost"]
    assert isinstance(cost, dict)
    assert set(cost["origin"]) >= {"hash", "model", "kernels", "cpu_variant", "threads", "processor", "measured"}
    assert isinstance(calibration["num_samples"], int)
    assert calibration["num_samples"] > 50


def run(
    found: dict[str, object], error: float, monkeypatch: pytest.MonkeyPatch, *words: str, asked: list[str] | None = None
) -> int:
    """The command's exit code, with a child that says this calibration with this mean error of decodes."""
    fit_error = {**dict.fromkeys(("decode_median", "prompt_median", "prompt_mean"), 0.1), "decode_mean": error}
    reply = {**found, "fit_error": {**fit_error, "decode_steps": 90, "prompt_steps": 60}}

    def ask(
        tool: str, question: object, reply_type: object, *, timeout: float, package: str
    ) -> list[dict[str, object]]:
        (asked if asked is not None else []).append(f"{package}.{tool}")
        return [json.loads(json.dumps(reply))]

    monkeypatch.setattr(command, "ask", ask)
    return command.run(words)


def test_the_command_writes_what_the_child_says(
    calibration: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    out = tmp_path / "out.json"
    words = ("--seconds", "1", "--out", str(out), "--", "--max-num-queued-reqs", "9")
    assert run(calibration, 0.14, monkeypatch, *words, asked=asked) == 0
    assert asked == ["quire_lab.tools.calibrate"]
    written = json.loads(out.read_bytes())
    assert written["settings"]["max_num_queued_reqs"] == 9
    assert written["fit_error"]["decode_mean"] == 0.14
    said = capsys.readouterr().out
    assert "held out" in said
    assert "tokens/s" in said
    assert command.run(["--out", str(tmp_path / "no" / "out.json")]) == 2
    assert command.run(["--out", str(out), "--", "--no-such-flag"]) == 2


def test_a_large_error_is_written_by_force_alone(
    calibration: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert run(calibration, 0.51, monkeypatch, "--out", str(out)) == 1
    assert not out.exists()
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "measuring" not in one]
    assert "51.0% of decodes" in line
    assert "--force" in line
    assert run(calibration, 0.51, monkeypatch, "--out", str(out), "--force") == 0
    assert json.loads(out.read_bytes())["fit_error"]["decode_mean"] == 0.51
