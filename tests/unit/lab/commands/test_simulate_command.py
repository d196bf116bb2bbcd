"""`quire simulate`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire_lab.commands.simulate import run

TRACE = str(Path(__file__).parents[4] / "benchmarks" / "data" / "azure_conv_sample.csv")
COST = "step=20ms,row=0.2ms,context=0.1us,token=0.1ms"


def test_lengths_arrivals_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "blocks.svg"
    assert (
        run(["--lengths", "32,128,64,256", "--arrivals", "0,2,4,6", "--compare", "static", "--plot", str(picture)]) == 0
    )
    out = capsys.readouterr().out
    assert "after steps 32/130/68/262" in out
    assert "peak 16 of" in out
    assert "cumulative 30" in out
    assert "█" in out
    assert picture.read_text().startswith("<svg")


def test_a_trace_its_objectives_and_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "first.json"
    load = ["--trace", TRACE, "--requests", "30", "--cost", COST]
    assert run([*load, "--slo", "ttft_p95=60s", "--json", str(first)]) == 0
    plain = json.loads(first.read_text())
    assert plain["report"]["served"] == 30
    assert plain["settings"]["max_num_seqs"] == 64
    capsys.readouterr()
    assert run([*load, "--slo", "itl_p50=1ms", "--against", str(first), "--set", "max_num_seqs=2"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert "request_rate" in out


def test_what_preemptions_cost_with_lengths_that_clients_do_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first.json"
    load = ["--trace", TRACE, "--requests", "40", "--cost", COST, "--set", "num_blocks=300", "--max-tokens", "600"]
    assert run([*load, "--set", "admission=prompt", "--json", str(first)]) == 0
    plain = json.loads(first.read_text())
    assert plain["load"]["max_tokens"] == 600
    before = plain["report"]
    assert before["recomputed_tokens"] > 0
    assert sum(before["preemptions_by_cause"].values()) == before["preemptions"] >= before["most_preemptions"] > 0
    assert f"{before['recomputed_tokens']:,} tokens recomputed" in capsys.readouterr().out
    assert run([*load, "--against", str(first)]) == 0
    assert "recomputed_tokens" in capsys.readouterr().out


def test_coarser_prefixes_are_worth_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(Path(TRACE).with_name("mooncake_conversation_sample.jsonl"))
    cached = {}
    for name in ("whole", "blocks", "radix"):
        file = tmp_path / name
        load = ["--trace", trace, "--requests", "60", "--cost", "unit", "--scale-len", "0.05", "--scale-rate", "0.01"]
        assert run([*load, "--prefix-match", name, "--json", str(file)]) == 0
        plain = json.loads(file.read_text())
        assert plain["load"]["prefix_match"] == name
        assert plain["report"]["served"] == 60
        cached[name] = plain["report"]["cached_tokens"]
    assert 0 <= cached["whole"] < cached["blocks"] <= cached["radix"]
    assert "from the prefix cache" in capsys.readouterr().out.replace("\n", " ")


def test_memory_without_pages_is_drawn_with_its_holes(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--lengths", "90,200,60,120,90,40", "--arrivals", "0,1,2,3,60,100", "--set", "num_blocks=24"]
    assert run([*load, "--compare", "contiguous"]) == 0
    out = capsys.readouterr().out
    assert "The same load in memory without pages" in out
    assert "and with enough of them, but in holes" in out
    assert "· a hole" in out
    assert "░" in out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--lengths", "4", "--prefix-match", "whole"], "with a prefix cache"),
        (["--trace", TRACE, "--cost", COST, "--replicas", "2", "--prefix-match", "blocks"], "without --replicas only"),
        (["--trace", TRACE], "quire calibrate"),
        (["--trace", "absent.csv", "--cost", COST], "cannot be read"),
        (["--trace", TRACE, "--cost", COST, "--set", "speed=9"], "speed is no setting"),
        (["--trace", TRACE, "--cost", COST, "--slo", "ttft=1"], "QUANTITY_STATISTIC"),
        (["--trace", TRACE, "--cost", COST, "--against", "absent.json"], "--against"),
        (["--lengths", "3,4", "--arrivals", "1"], "2 lengths and 1 arrivals"),
    ],
)
def test_what_cannot_work_is_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(argv) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "now"),
    [
        (["--check", "all"], "python -m quire_lab.studies`"),
        (["--data", "/data", "--check", "v3"], "python -m quire_lab.studies v3`"),
    ],
)
def test_published_numbers_are_compared_elsewhere(
    argv: list[str], now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(argv)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert now in said
    assert said.count("\n") == 1
