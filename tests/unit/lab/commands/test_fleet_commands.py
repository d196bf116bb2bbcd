"""`quire simulate --replicas` and `quire plan --fleet`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire_lab.commands import plan, simulate

TRACE = str(Path(__file__).parents[4] / "benchmarks" / "data" / "mooncake_conversation_sample.jsonl")
SERVER = [
    *("--cost", "step=12ms,row=0.06ms,context=0.02us,token=0.083ms", "--set", "block_size=512"),
    *("--set", "num_blocks=600", "--set", "max_model_len=131072", "--set", "max_num_batched_tokens=4096"),
    *("--set", "prefill_chunk=4096"),
]
LOAD = ["--trace", TRACE, "--requests", "24", *SERVER]


def test_policies_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, numbers = tmp_path / "ttft.svg", tmp_path / "fleet.json"
    out = ["--plot", str(picture), "--json", str(numbers)]
    asked = ["--replicas", "3", "--route", "predicted_ttft,round_robin", "--level", "both", *out]
    assert simulate.run([*LOAD, *asked]) == 0
    said = capsys.readouterr().out
    for text in ("3 replicas, step level", "3 replicas, coarse level", "predicted_ttft", "round_robin", "fitted to 2"):
        assert text in said
    assert "coarse against step" in said
    assert "one cache of all 3 pools" in said
    assert picture.read_text().count("<polyline") == 2
    plain = json.loads(numbers.read_text())
    assert [one["route"] for one in plain["step"]] == ["predicted_ttft", "round_robin"]
    assert plain["step"][0]["report"]["served"] == 24
    assert plain["step"][0]["wanted"] >= plain["step"][0]["wanted_mean"] > 0
    assert said.count("wants ") == 4
    assert plain["fleet"]["replica"]["num_blocks"] == 600


def test_objectives_copies_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--replicas", "20", "--copies", "2", "--lose-replica", "3", "--slow-replica", "2", "--slo", "ttft_p95=1ms"]
    assert simulate.run([*LOAD, *asked, "--fit-requests", "10"]) == 1
    said = capsys.readouterr().out
    assert "20 replicas, coarse level" in said
    assert "MISSED by predicted_ttft: ttft_p95" in said


def test_the_fewest_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "plan.json"
    asked = ["--fleet", "--slo", "ttft_p95=3s", "--route", "predicted_ttft,least_requests", "--replica-cost", "2"]
    assert plan.run([*LOAD, *asked, "--fit-requests", "10", "--json", str(numbers)]) == 0
    said = capsys.readouterr().out
    assert "Replicas for ttft_p95=3s" in said
    assert "predicted_ttft" in said
    assert said.count("wants ") == 2
    plans = json.loads(numbers.read_text())["plans"]
    assert plans[0]["replicas"] <= plans[1]["replicas"]


@pytest.mark.matrix  # the simulation alone: test_fleet.py
def test_ranks_and_roles_beside_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "plan.json"
    asked = ["--fleet", "--slo", "ttft_p95=3s,itl_p99=60ms", "--ranks", "2", "--layers", "28", "--roles"]
    assert plan.run([*LOAD, *asked, "--fit-requests", "10", "--json", str(numbers)]) == 0
    said = capsys.readouterr().out
    assert "The same of 2 ranks each" in said
    assert "servers of 2 ranks keep the objectives with" in said
    assert "Roles, step level" in said
    plain = json.loads(numbers.read_text())
    assert plain["roles"]["pays"] == ("roles pay on this load" in said)
    assert ("leave --role out" in said) != plain["roles"]["pays"]
    assert plain["ranks"][0]["replicas"] <= plain["plans"][0]["replicas"]


def test_a_fleet_with_a_replica_for_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.run([*LOAD, "--replicas", "3", "--prompt-replicas", "1", "--transfer", "20us"]) == 0
    assert " prompts passed on, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--replicas", "2", "--route", "sticky"], "route policy 'sticky' is unknown; use predicted_ttft"),
        (["--replicas", "2", "--lose-replica", "1", "--lose-replica", "2"], "2 of 2 replicas are lost"),
        (["--replicas", "17", "--level", "step"], "17 replicas are too many to simulate step by step, at most 16"),
        (["--replicas", "2", "--plot"], "needs a FILE"),
        (["--replicas", "2", "--prompt-replicas", "2"], "2 of 2 replicas are for prompts"),
        (["--replicas", "2", "--prompt-replicas", "1", "--level", "coarse"], "step by step"),
        (["--prompt-replicas", "1"], "--prompt-replicas needs --replicas"),
        (["--replicas", "2", "--transfer", "soon"], "--transfer is 'soon'; write a time"),
        (["--replicas", "2", "--stale-index", "-1"], "at least 0"),
        (["--replicas", "2", "--compare", "static"], "--compare"),
        (["--replicas", "2", "--max-tokens", "5000"], "--max-tokens"),
        (["--replicas", "2", "--against", "a.json"], "--against"),
    ],
)
def test_what_cannot_work_is_one_line(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.run([*LOAD, *argv]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_a_flag_of_fleets_without_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.run([*LOAD, "--route", "round_robin"]) == 2
    assert "--route needs --replicas" in capsys.readouterr().err
    assert plan.run([*LOAD, "--slo", "ttft_p95=3s", "--copies", "2"]) == 2
    assert "--copies needs --fleet" in capsys.readouterr().err
