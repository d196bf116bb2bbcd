"""`quire plan`: the reference documents' memory numbers, the highest rate within objectives, the section it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.cost_model import CostModel
from quire_lab.commands.plan import run
from quire_lab.commands.planning.plan_section import BEGIN, END, write
from quire_lab.simulation.fitting import FitError
from quire_lab.simulation.kv_memory import KVShape, kv_shape, sequence_memory, shared_prefix
from quire_lab.simulation.report import report
from quire_lab.simulation.search import BACKLOG, Search, is_steady
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate
from quire_lab.simulation.slo import parse_slo
from quire_lab.studies.published import poisson

GPT = {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float16", "n_positions": 1024}
GQA = {
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
    **{"dtype": "float16", "max_position_embeddings": 8192},
}
MLA = {**GQA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
COST = CostModel(step=0.01)


def write_trace(path: Path, rows: Sequence[TraceRow]) -> None:
    names = ("at", "input_tokens", "output_tokens")
    path.write_text("\n".join(json.dumps({name: getattr(row, name) for name in names}) for row in rows))


def checkpoint(folder: Path, plain: object) -> Path:
    (folder / "config.json").write_text(json.dumps(plain))
    return folder


def test_f9_a_reservation_against_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    shape = KVShape(layers=32, kv_heads=32, head_dim=128, bytes_per_value=2)
    found = sequence_memory(shape, tokens=500, max_len=4096, block_size=16)
    assert shape.layer_bytes_per_token * 4096 == 64 << 20
    assert (found.reserved_bytes, found.paged_bytes, found.ratio) == (2 << 30, 256 << 20, 8.0)
    assert round(found.reserved_waste, 3) == 0.878
    assert (found.blocks, found.slack) == (32, 12)
    assert run(["--kv", "--shape", "32,32,128,2"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("268.4 MB", "262.1 MB", "2.147 GB", "8 : 1", "87.8%"))


def test_f10_grouped_heads_and_what_60_gb_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(checkpoint(tmp_path, GQA))
    assert kv_shape(tmp_path).bytes_per_block(16) == 2_097_152
    assert run(["--kv", "--model", folder, "--memory", "60GB"]) == 0
    assert "28,610 blocks" in capsys.readouterr().out
    assert run(["--kv", "--model", folder, "--memory", "60GiB"]) == 0
    assert "30,720 blocks" in capsys.readouterr().out


def test_f11_a_prefix_that_sessions_share(capsys: pytest.CaptureFixture[str]) -> None:
    found = shared_prefix(prefix=200, sessions=16, block_size=16)
    assert (found.shared_blocks, found.separate_blocks, found.saved_blocks) == (13, 208, 195)
    assert run(["--kv", "--prefix", "200", "--sessions", "16"]) == 0
    assert "13 blocks shared, 208 separate, 195 saved" in capsys.readouterr().out


def test_ranks_and_stages_hold_every_block_once(capsys: pytest.CaptureFixture[str]) -> None:
    shape = KVShape(layers=10, kv_heads=8, head_dim=128, bytes_per_value=2)
    block = 16 * shape.bytes_per_token
    assert shape.of_rank(4).bytes_per_token * 4 == shape.bytes_per_token
    assert shape.of_rank(16).bytes_per_token * 16 == 2 * shape.bytes_per_token
    parts = shape.stage_bytes(4, 16)
    assert len(parts) == 4
    assert (sum(parts), max(parts)) == (block, 3 * block // 10)
    assert run(["--kv", "--shape", "10,8,128,2", "--ranks", "16", "--stages", "4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "16 ranks: one table for all; of a block's 640 KiB each holds its heads' part in every layer, 80.0 KiB" in said
    )
    assert "each head 2 times" in said
    assert "4 stages: one table for all; of a block's 640 KiB each holds its layers' part, at most 192 KiB" in said


def test_shapes_of_other_families(tmp_path: Path) -> None:
    assert kv_shape(checkpoint(tmp_path, GPT)).bytes_per_token == 2 * 12 * 12 * 64 * 2
    assert kv_shape(checkpoint(tmp_path, MLA)).bytes_per_token == 32 * (512 + 64) * 2
    assert kv_shape(checkpoint(tmp_path, {"text_config": GQA, "vision_config": {}})).kv_heads == 8
    assert kv_shape(checkpoint(tmp_path, {**GPT, "multi_query": True})).kv_heads == 1
    wrongs: list[dict[str, object]] = [{"num_hidden_layers": None}, {"dtype": "int3"}, {"num_attention_heads": "x"}]
    for plain in ([], *({**GQA, **wrong} for wrong in wrongs)):
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            kv_shape(checkpoint(tmp_path, plain))


def test_the_highest_rate_is_that_of_the_queue() -> None:
    """One slot and 10 ms steps: with a mean wait of 10 ms M/D/1 is loaded by two thirds."""
    setup = replace(Setup(cost=CostModel(step=0.01)), max_num_queued_reqs=2_000).with_settings(
        [("max_num_seqs", 1), ("enable_prefix_caching", False)]
    )
    search = Search(setup, poisson(500, 50.0, seed=2), parse_slo("queue_mean=10ms"))
    found = search.sustained((("max_num_seqs", 1),), search._rows, 1.02)
    assert found.rate == pytest.approx(200 / 3, rel=0.1)
    assert found.binding == "queue_mean"
    assert found.rate < found.missed_at < 1.03 * found.rate


def test_a_burst_is_no_rate() -> None:
    """All at once is served within 20 s; but whoever sends like that for longer is not."""
    setup = Setup(cost=COST).with_settings([("max_num_seqs", 4)])
    rows = poisson(200, 5.0, output_tokens=10, seed=1)
    assert is_steady(report(simulate(setup, rows)))
    assert not is_steady(report(simulate(setup, rows, speed=1000.0)))
    found = Search(setup, rows, parse_slo("ttft_p95=20s")).sustained((("max_num_seqs", 4),), rows, 1.05)
    assert found.binding == BACKLOG
    assert 0.7 < found.rate / (4 / (10 * 0.01)) < 1.2, "four slots, ten steps each"


@pytest.mark.matrix  # the search alone: test_fleet.py
def test_the_plan_finds_what_was_planted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps cost the same whatever is in them: then more sequences at once are better, little else matters."""
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, poisson(60, 2.0, input_tokens=20, output_tokens=8, seed=4))
    serving = tmp_path / "SERVING.md"
    serving.write_text("# Ours\n\nText.\n")
    argv = ["--slo", "ttft_p95=1s,itl_p99=200ms", "--trace", str(trace), "--cost", "step=20ms,token=0ms"]
    argv += ["--set", "max_num_seqs=4", "--candidates", "4", "--write", str(serving)]
    argv += ["--try", "max_num_seqs=2,4,8", "--try", "max_num_batched_tokens=512", "--try", "prefill_chunk=512"]
    argv += ["--try", "itl_target=0", "--json", str(tmp_path / "plan.json")]
    assert run(argv) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert dict(plan["best"]["settings"])["max_num_seqs"] == 8
    assert {one["value"] for one in plan["rejected"] if one["name"] == "max_num_seqs"} == {2, 4}
    assert plan["best"]["rate"] > 1.5 * plan["base"]["rate"]
    text = serving.read_text()
    assert text.startswith("# Ours\n\nText.\n")
    assert "| `--max-num-seqs` | **8** |" in text
    assert "Steps take the times that the command gives; their error is not known." in text
    assert run(argv) == 0
    assert serving.read_text() == text
    assert "says so already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mean", "judged"), [(0.08, "8.0% of decodes, 4.0% with prompts)"), (0.2, "more than the 15%")]
)
def test_the_plan_carries_the_error_of_its_calibration(mean: float, judged: str, tmp_path: Path) -> None:
    trace, calibration, serving = (tmp_path / name for name in ("trace.jsonl", "calibration.json", "S.md"))
    write_trace(trace, [TraceRow(at=float(at), input_tokens=9, output_tokens=9) for at in range(4)])
    error = FitError(
        decode_steps=40, decode_median=0.05, decode_mean=mean, prompt_steps=20, prompt_median=0.03, prompt_mean=0.04
    )
    cost = COST.as_plain() | {"prompt": [[1, 0.01]], "origin": {"hash": "ab12", "processor": "a CPU"}}
    calibration.write_text(json.dumps({"cost": cost, "fit_error": error.as_plain()}))
    argv = ["--slo", "ttft_p50=5s", "--trace", str(trace), "--cost", str(calibration), "--candidates", "1"]
    assert run([*argv, "--write", str(serving), "--json", str(tmp_path / "plan.json")]) == 0
    assert f"(calibration ab12; mean error on held-out steps {mean:.1%} of decodes" in serving.read_text()
    assert judged in serving.read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["fit_error"] == error.as_plain()
    calibration.write_text(json.dumps({"cost": cost, "fit_error": {"decode_mean": 1}}))
    assert run(argv) == 2
    calibration.write_text(json.dumps({"cost": cost}))
    assert run([*argv, "--write", str(serving)]) == 0
    assert "(calibration ab12; its error is not known)" in serving.read_text()


def test_objectives_that_nothing_meets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRow(at=float(at), input_tokens=9, output_tokens=9) for at in range(2)])
    argv = ["--slo", "ttft_p50=1ms", "--trace", str(trace), "--cost", "step=20ms", "--candidates", "1"]
    assert run(argv) == 1
    assert "ttft_p50 is missed even by requests alone" in capsys.readouterr().err


def test_only_the_section_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "S.md"
    assert write(path, "Planned on 2026-01-01 a")
    path.write_text(f"before\n\n{path.read_text()}\nafter\n")
    assert not write(path, "Planned on 2026-02-02 a"), "only the date differs"
    assert write(path, "Planned on 2026-02-02 b")
    assert path.read_text() == f"before\n\n{BEGIN}\nPlanned on 2026-02-02 b\n{END}\n\nafter\n"
    path.write_text(f"{END} {BEGIN}")
    with pytest.raises(ConfigError, match="marks"):
        write(path, "c")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "--slo with --trace"),
        (["--kv", "--shape", "1,2,3"], "four numbers"),
        (["--kv", "--shape", "4,6,64,2", "--ranks", "4"], "6 KV heads are not divided among 4 ranks"),
        (["--kv", "--shape", "4,6,64,2", "--stages", "5"], "4 layers make at most 4 stages, not 5"),
        (["--kv", "--tokens", "5000", "--max-len", "4096"], "more than --max-len"),
        (["--kv", "--model", "absent"], "no such directory"),
        (["--slo", "ttft_p95=1s", "--trace", "absent", "--cost", "unit"], "cannot be read"),
    ],
)
def test_what_cannot_be_planned(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    assert complaint in capsys.readouterr().err
