"""`quire replay`: the same plans from a log, the first difference told, other settings beside the recorded ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from quire_engine.scheduling.scheduler import Scheduler
from quire_lab.commands.replay import run
from quire_lab.simulation.counterfactual import BaseFigure, measured
from quire_lab.simulation.recorded import Entry, Recording
from quire_server.showing.terminal import duration
from support.fake_executor import FakeExecutor, request
from support.limits import scheduler_config

LENGTHS = ((40, 6), (25, 12), (9, 3), (60, 9))


def lines() -> list[dict[str, Any]]:
    """A log in the format that `scheduling.step_records` describes, of a scheduler without a prefix cache."""
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "itl_target": 0.0, "enable_prefix_caching": False}
    config = scheduler_config(num_blocks=32, **limits)
    scheduler, executor = Scheduler(config), FakeExecutor(config.limits.block_size)
    made: list[dict[str, Any]] = [{"kind": "config", "format": 2, "config": asdict(config), "first_step": 1}]
    names: dict[int, str] = {}
    ordinal = 0
    for number, (inputs, outputs) in enumerate(LENGTHS):
        ordinal += 1
        scheduler.add(request(f"r{number}", inputs, outputs, arrival=1.0), 1.0)
        asked = {"num_prompt_tokens": inputs, "max_new_tokens": outputs, "n": 1, "arrival_time": 1.0}
        made.append({"kind": "submit", "ordinal": ordinal, "at": 1.0, "request_id": f"r{number}", "request": asked})
    now, step = 1.0, 0
    while scheduler.has_work:
        batch = scheduler.schedule(now)
        assert batch is not None
        names |= {s.sequence_id: s.group.request.request_id for s in scheduler._roster.sequences.values()}
        step, ordinal = step + 1, ordinal + 2
        entry: dict[str, Any] = {
            **{"kind": "step", "step_id": step, "ordinal": ordinal - 1, "applied_ordinal": ordinal, "planned_at": now},
            **{
                "applied_at": now + 0.1,
                "seconds": 0.1,
                "blocks_used": scheduler._kv.num_blocks - scheduler._kv.num_available,
            },
            "slices": [[names[item.sequence_id], 0, item.start, item.num_tokens] for item in batch.items],
            **{"prefill_tokens": batch.num_tokens - batch.num_decodes, "decode_tokens": batch.num_decodes},
            **{"running": scheduler._roster.num_running, "waiting": len(scheduler._roster.waiting), "ends": []},
        }
        now += 0.1
        for output in scheduler.apply(batch, executor.execute(batch), now):
            if output.finish is not None:
                asked_for = LENGTHS[int(output.request_id[1:])][1]
                entry["ends"].append([output.request_id, output.choice, output.finish, asked_for])
        made.append(entry)
    return made


def written(folder: Path, entries: list[dict[str, Any]]) -> list[str]:
    path = folder / "log.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return ["--log", str(path)]


def test_the_same_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = lines()
    assert run(written(tmp_path, entries)) == 0
    steps = sum(entry["kind"] == "step" for entry in entries)
    assert f"the same plans: {steps} steps of 4 requests" in capsys.readouterr().out


def test_a_difference_is_told_with_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = lines()
    third = [entry for entry in entries if entry["kind"] == "step"][2]
    third["slices"][0][3] += 1
    assert run(written(tmp_path, entries)) == 1
    out = capsys.readouterr().out
    assert "step 3 differs in slices, after 2 equal ones" in out
    assert "replayed" in out
    assert "earlier run" not in out
    entries[0]["restored_blocks"] = 3
    assert run(written(tmp_path, entries)) == 1
    assert "began with 3 blocks of an earlier run" in capsys.readouterr().out.replace("\n", " ")


def test_other_settings_beside_the_recorded_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = ["--cost", "step=20ms,row=1ms,token=1ms"]
    assert run([*written(tmp_path, lines()), *cost, "--set", "max_num_seqs=1"]) == 0
    out = capsys.readouterr().out
    assert "4 recorded requests" in out
    assert "max_num_seqs=1" in out
    assert run([*written(tmp_path, lines()), "--set", "max_num_seqs=1"]) == 2, "too few steps for a cost model"
    assert "--cost" in capsys.readouterr().err


def base_of(folder: Path, cost: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*written(folder, lines()), "--cost", cost, "--set", "max_num_seqs=1"]) == 0
    return capsys.readouterr().out


def test_a_simulated_base_unlike_the_recorded_run_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded steps take 0.1 s each: with such a cost model the base agrees, with a quarter of it it does not."""
    right = base_of(tmp_path, "step=100ms,token=0ms", capsys)
    assert "warning" not in right
    wrong = base_of(tmp_path, "step=25ms,token=0ms", capsys)
    steps = sum(entry["kind"] == "step" for entry in lines())
    assert "warning: the simulated base is not the recorded run: more than 20% apart" in wrong.replace("\n", " ")
    assert f"computing: {duration(steps / 10)} recorded, {duration(steps / 40)} simulated (-75%)" in wrong
    assert "e2e p95" in wrong.split("apart in")[1]
    assert "steps:" not in wrong, "the plans are the same"


def test_figures_that_differ_by_one_or_a_millisecond_are_one_base() -> None:
    figure = {"name": "x", "recorded": 0.0}
    assert not BaseFigure(**figure, simulated=1, is_time=False).differs
    assert BaseFigure(**figure, simulated=2, is_time=False).differs
    assert not BaseFigure(**figure, simulated=0.001, is_time=True).differs
    assert BaseFigure(**figure, simulated=0.002, is_time=True).differs
    assert not BaseFigure(name="x", recorded=80, simulated=100, is_time=False).differs
    assert BaseFigure(name="x", recorded=79, simulated=100, is_time=False).differs


def test_preemptions_and_blocks_of_the_recorded_run_are_compared() -> None:
    entries = lines()
    steps = [entry for entry in entries if entry["kind"] == "step"]
    steps[1]["decisions"] = [{"kind": "preempted", "request_id": "r0"}, {"kind": "waits", "request_id": "r1"}]
    steps[2]["starved"] = ["r0"]
    plain = [Entry(kind=one["kind"], ordinal=one.get("ordinal", 0), plain={"ends": []} | one) for one in entries[1:]]
    found = measured(Recording(config=scheduler_config(num_blocks=32), first_step=1, entries=tuple(plain)))
    assert (found.preemptions, found.steps) == (2, len(steps))
    assert found.peak_blocks == max(step["blocks_used"] for step in steps)
    assert found.busy_seconds == pytest.approx(0.1 * len(steps))
    ends = {name: step["applied_at"] - 1.0 for step in steps for name, *_ in step["ends"]}
    assert found.e2e.max == pytest.approx(max(ends.values()))


def _without_drafts(entries: list[dict[str, Any]]) -> None:
    entries[0]["config"]["speculates"] = True
    for entry in entries:
        entry.pop("drafts", None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda entries: entries[0].update(format=1), "log.jsonl:1: the log has format 1"),
        (lambda entries: entries.pop(0), "no step log"),
        (lambda entries: entries[0].update(first_step=9), "begins with step 9"),
        (lambda entries: entries[-1].pop("slices"), "there is no 'slices'"),
        (lambda entries: entries[0]["config"]["limits"].update(max_num_seqs=0), "max_num_seqs is 0"),
        (_without_drafts, "guessed tokens ahead (speculation), which a log of its version"),
        (lambda entries: entries.append({"kind": "sleep"}), "'sleep' are unknown"),
    ],
)
def test_what_is_no_log_is_refused(
    change: Any, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = lines()
    change(entries)
    assert run(written(tmp_path, entries)) == 2
    assert complaint in capsys.readouterr().err


def test_settings_of_a_later_version_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = lines()
    entries[0]["config"]["limits"]["later"] = 3
    assert run(written(tmp_path, entries)) == 0
    assert "later" in capsys.readouterr().out
