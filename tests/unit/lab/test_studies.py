"""Studies of papers: the numbers they are held to, and what the command prints and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire_bench.traces import TraceRow, read_trace
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.cost_model import CostModel
from quire_lab.simulation.report import report
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate
from quire_lab.studies import admission
from quire_lab.studies.__main__ import main
from quire_lab.studies.fairness import shares
from quire_lab.studies.published import EXERCISES, Check, hit_rate, poisson, queue_of_one

DATA = Path(__file__).parents[3] / "benchmarks" / "data"
COST = CostModel(step=0.02, row=0.001, context=1e-6, prompt=((1, 0.02), (512, 0.5)), chunk_context=1e-6)


def test_the_command_says_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["s1.3", "s3.1"]) == 0
    out = capsys.readouterr().out
    assert "46.875%" in out
    assert "DIFFERS" not in out
    assert main(["v3", "--data", "absent"]) == 2
    said = capsys.readouterr().err
    assert "conversation_trace.jsonl" in said
    assert said.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["v99"])


def test_a_number_that_differs_is_named_and_ends_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [Check(name="steps", expected=1, got=2)]
    monkeypatch.setitem(EXERCISES, "s1.3", ("another", lambda: wrong))
    assert main(["s1.3", "s3.1"]) == 1
    assert capsys.readouterr().out.count("DIFFERS") == 1


@pytest.mark.parametrize("name", sorted(set(EXERCISES) - {"v10"}))
def test_published_numbers(name: str) -> None:
    checks = EXERCISES[name][1]()
    assert [check for check in checks if not check.ok] == []
    assert len(checks) >= 2


@pytest.mark.matrix  # a study, on what test_simulation.py has
def test_v10_the_queue_of_one_slot_is_m_d_1() -> None:
    """In full by the study v10; here fewer requests, and each wait against Lindley's recursion."""
    (check,) = queue_of_one(10_000, loads=(0.5,))
    assert check.got == pytest.approx(check.expected, rel=0.06)
    rows, free, waits = poisson(1_000, 0.7, seed=3), 0.0, []
    for one in rows:
        begins = max(one.at, free)
        waits.append(begins - one.at)
        free = begins + 1.0
    limits = SchedulerLimits(enable_prefix_caching=False, max_num_seqs=1, max_bypasses=0)
    asked = replace(
        Setup(), scheduler=SchedulerConfig(num_blocks=8, max_model_len=64, limits=limits), max_num_queued_reqs=1_000
    )
    got = [served.first_at - served.at - 1.0 for served in simulate(asked, rows).done]
    assert got == pytest.approx(waits)


def test_v2_v3_prefix_hits_by_the_size_of_the_cache() -> None:
    """The published sizes need the whole traces, which the study v3 reads."""
    rows = [
        TraceRow(at=0.0, input_tokens=tokens, output_tokens=1, blocks=blocks, block_tokens=10)
        for tokens, blocks in ((25, (1, 2, 3)), (30, (4, 5, 6)), (25, (1, 2, 3)), (29, (1, 2, 7)), (30, (4, 9, 6)))
    ]
    infinite = hit_rate(rows)
    assert (infinite.hit_tokens, infinite.hit_blocks, infinite.prompt_tokens) == (25 + 20 + 10, 3 + 2 + 1, 139)
    assert hit_rate(rows, 6) == replace(infinite, blocks=6, hit_tokens=25 + 20 + 10)
    assert hit_rate(rows, 4).hit_tokens == 10 + 20, "of the third prompt block 1 is left, the last to be reused"
    sample = hit_rate(read_trace(DATA / "mooncake_conversation_sample.jsonl"))
    assert (sample.hit_blocks, sample.asked_blocks) == (59, 1486), "all but one share the first block"


def test_prefix_hits_come_from_the_real_cache_too() -> None:
    """A pool that holds everything hits what the study says, but for the block that is recomputed at the least."""
    rows = [replace(one, at=100.0 * i) for i, one in enumerate(read_trace(DATA / "mooncake_conversation_sample.jsonl"))]
    asked = Setup(cost=COST).with_settings([("num_blocks", 60_000), ("max_model_len", 200_000)])
    found = report(simulate(asked, rows[:12]))
    study = hit_rate(rows[:12])
    assert 0 <= study.hit_tokens - found.cached_tokens <= 12 * 16


def test_v4_tenants_shares_follow_their_weights(tmp_path: Path) -> None:
    """The published loads need their files, which the study v4 reads; here two tenants ask for more than there is."""
    path = tmp_path / "clients.csv"
    lines = [f"{i % 2},{i / 10:.1f},32,24,0,0" for i in range(160)]
    path.write_text(
        "client,req_time_s,prompt_len,output_len,first_token_latency_s,request_latency_s\n" + "\n".join(lines)
    )
    rows = [replace(one, weight=1.0 + int(one.tenant)) for one in read_trace(path)]
    asked = Setup(cost=CostModel(step=0.05), max_num_queued_reqs=500).with_settings(
        [("max_num_seqs", 4), ("num_blocks", 64), ("enable_prefix_caching", False), ("itl_target", 0.0)]
    )
    fair = shares(asked.with_settings([("scheduling_policy", "wfq")]), rows)
    assert fair.service["1"] / fair.service["0"] == pytest.approx(2, rel=0.15)
    assert fair.largest_gap <= 2 * 2 * 64 * 16
    first_come = shares(asked.with_settings([("scheduling_policy", "fcfs")]), rows)
    assert first_come.service["1"] / first_come.service["0"] == pytest.approx(1, rel=0.1)
    assert first_come.largest_gap > fair.largest_gap


def test_admission_by_growth_beside_admission_by_the_prompt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study with small loads; in full by its name, with the trace."""
    small = [
        admission.Load(
            name="thrash", rows=admission.thrash(16, 120), setup=admission.server("unit", 20), is_ordinary=False
        ),
        admission.Load(name="calm", rows=admission.thrash(4, 40), setup=admission.server("unit", 32)),
        admission.Load(
            name="squeeze",
            rows=[replace(row, tenant=f"{i % 2}") for i, row in enumerate(admission.thrash(8, 40))],
            setup=admission.server("unit", 99),
            spared="1",
        ),
    ]
    monkeypatch.setattr(admission, "loads", lambda: small)
    monkeypatch.setattr(admission, "_AMPLE", 512)
    runs, checks = admission.compare()
    assert [check.ok for check in checks] == [True] * 4
    by_prompt, by_growth = runs[0].found, runs[1].found
    assert by_growth.preemptions < by_prompt.preemptions
    assert by_growth.recomputed < by_prompt.recomputed
    assert main(["admission"]) == 0
    out = capsys.readouterr().out
    assert "recomputed" in out
    assert "throughput kept" in out


def test_the_loads_of_the_admission_study_fit_their_pools() -> None:
    for load in admission.loads():
        config = load.setup.scheduler
        for row in load.rows:
            assert row.output_tokens <= config.largest_max_tokens(num_prompt=row.input_tokens, n=1)
