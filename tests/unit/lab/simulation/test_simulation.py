"""Simulated runs: times by hand, the queue's limits, static batches, what a report says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from quire_bench.traces import TraceError, TraceRow, read_trace
from quire_engine.contract.batch import Batch
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.cost_model import UNIT_STEPS, CostModel, cost_model, read_cost, seconds
from quire_lab.simulation.lengths import exercise_setup, rows_of
from quire_lab.simulation.plotting import svg, terminal
from quire_lab.simulation.report import compare, jain, report
from quire_lab.simulation.requests import as_request
from quire_lab.simulation.setup import Setup, parse_settings, setup
from quire_lab.simulation.simulator import Simulation, simulate
from quire_lab.simulation.slo import parse_slo
from quire_lab.simulation.static_batching import simulate_static
from quire_lab.studies.published import poisson
from support.covering import few

COST = CostModel(step=0.02, row=0.001, context=1e-6, prompt=((1, 0.02), (512, 0.5)), chunk_context=1e-6)


def row(at: float = 0.0, inputs: int = 10, outputs: int = 3, tenant: str = "") -> TraceRow:
    return TraceRow(at=at, input_tokens=inputs, output_tokens=outputs, tenant=tenant)


def test_a_request_alone_takes_what_its_steps_take() -> None:
    found = simulate(Setup(cost=COST), [row(at=5.0, inputs=100, outputs=3)])
    (one,) = found.done
    assert one.at == 5.0
    assert one.ttft == pytest.approx(COST.prompt_seconds(100))
    assert one.e2e - one.ttft == pytest.approx(2 * 0.021 + 101e-6 + 102e-6)
    assert list(found.gaps) == pytest.approx([0.021 + 101e-6, 0.021 + 102e-6])


def test_a_long_prompt_is_computed_in_chunks_that_look_back() -> None:
    seen: list[int] = []

    def watch(batch: Batch, began: float, ended: float) -> None:
        seen.append(batch.num_tokens)
        before = sum(item.start * item.num_tokens for item in batch.items)
        assert ended - began == pytest.approx(COST.prompt_seconds(batch.num_tokens) + 1e-6 * before)

    simulate(Setup(cost=COST), [row(inputs=1500, outputs=1)], watch=watch)
    assert sum(seen) == 1500
    assert max(seen) == 512


def test_requests_beyond_the_queue_are_refused() -> None:
    asked = Setup(cost=COST, max_num_queued_reqs=1).with_settings([("max_num_seqs", 2)])
    found = report(simulate(asked, [row(outputs=50) for _ in range(5)]))
    assert (found.served, found.refused) == (3, {"max_num_queued_reqs": 2})
    by_tokens = replace(asked, max_num_queued_tokens=25)
    assert report(simulate(by_tokens, [row(outputs=50) for _ in range(5)])).refused == {"max_num_queued_tokens": 3}
    too_long = report(simulate(asked, [row(inputs=70_000)]))
    assert too_long.refused == {"infeasible": 1}


def test_planning_ahead_hides_no_step() -> None:
    """With a step in flight the same steps are computed one after the other; none overlaps another."""
    asked = Setup(cost=COST).with_settings([("plans_ahead", True)])
    spans: list[tuple[float, float]] = []
    found = simulate(asked, [row(at=0.1 * i, outputs=20) for i in range(6)], watch=lambda _, a, b: spans.append((a, b)))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert [one.num_tokens for one in found.done] == [20] * 6


def test_static_batches_wait_for_their_longest() -> None:
    asked = Setup(cost=UNIT_STEPS).with_settings([("max_num_seqs", 2)])
    static = simulate_static(asked, [row(outputs=2), row(outputs=10), row(outputs=1)])
    assert [one.last_at for one in static.outcome.requests] == [2.0, 10.0, 11.0]
    assert (static.batches, static.slot_steps, static.useful_steps) == (2, 21, 13)


def test_fairness_and_littles_law() -> None:
    assert jain([1, 1, 1]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    rows = [replace(one, tenant="ab"[i % 2]) for i, one in enumerate(poisson(400, 2.0, output_tokens=8, seed=5))]
    found = report(simulate(Setup(cost=COST), rows))
    assert found.little_residual == pytest.approx(0, abs=0.05)
    assert [(one.tenant, one.requests) for one in found.tenants] == [("a", 200), ("b", 200)]
    assert found.tenants[0].service == 200 * (1 + 2 * 8)
    assert found.jain == pytest.approx(1, abs=1e-3)


def test_objectives() -> None:
    slo = parse_slo("ttft_p95=2s,itl_p99=150ms")
    found = report(simulate(Setup(cost=COST), [row(outputs=9)]), slo)
    assert (found.misses, found.good) == ({}, 1)
    strict = report(simulate(Setup(cost=COST), [row(outputs=9)]), parse_slo("itl_p99=15ms"))
    assert list(strict.misses) == ["itl_p99"]
    assert strict.good == 0
    for text in ("ttft=2s", "ttft_p42=2s", "ttft_p95", "ttft_p95=soon", ""):
        with pytest.raises(ConfigError):
            parse_slo(text)


@pytest.mark.parametrize(("text", "value"), [("20ms", 0.02), ("3us", 3e-6), ("1.5s", 1.5), ("2", 2.0)])
def test_times(text: str, value: float) -> None:
    assert seconds(text, "x") == pytest.approx(value)


def test_cost_models_are_checked(tmp_path: Path) -> None:
    assert read_cost("step=20ms,token=1ms")[0].prompt_seconds(100) == pytest.approx(0.12)
    assert cost_model(COST.as_plain()) == COST
    assert COST.prompt_seconds(1023) == pytest.approx(0.02 + 0.48 * 1022 / 511)
    falling = {"step": 1, "prompt": [[1, 2.0], [8, 1.0]]}
    for plain in (falling, {"step": -1}, {}, {"prompt": 3}):
        with pytest.raises(ConfigError, match="quire calibrate"):
            cost_model(plain)
    for text in ("stop=1", str(tmp_path), str(tmp_path / "absent")):
        with pytest.raises(ConfigError):
            read_cost(text)


def test_guessed_tokens_take_rows_and_save_steps() -> None:
    """Twelve tokens of one request after the first, five guesses at most in a step, the last token is never guessed."""
    load = [row(inputs=100, outputs=13)]
    plain = simulate(Setup(cost=COST), load)
    right = simulate(Setup(cost=COST, speculation=1.0), load)
    wrong = simulate(Setup(cost=COST, speculation=1e-9), load)
    assert (plain.steps, right.steps, wrong.steps) == (13, 3, 13)
    assert right.guessed_tokens == right.guessed_right == 10
    assert wrong.guessed_right == 0 < wrong.guessed_tokens
    assert [one.done[0].num_tokens for one in (plain, right, wrong)] == [13, 13, 13]
    rows = right.computed_tokens - 100
    assert right.done[0].e2e - right.done[0].ttft == pytest.approx(
        2 * 0.02 + rows * 0.001, rel=0.05
    )  # and what they look at
    own = [row(inputs=100, outputs=13), replace(row(at=100.0, inputs=100, outputs=13), speculation=1.0)]
    mixed = simulate(Setup(cost=COST, speculation=1e-9), own)
    assert mixed.guessed_right == 10
    again = simulate(Setup(cost=COST, speculation=0.5), [row(at=i / 9, outputs=40) for i in range(20)])
    assert (
        again.guessed_right
        == simulate(Setup(cost=COST, speculation=0.5), [row(at=i / 9, outputs=40) for i in range(20)]).guessed_right
    )
    assert 0.2 < again.guessed_right / again.guessed_tokens < 0.5  # what is behind a wrong one is wrong


def test_the_share_of_right_guesses_is_a_setting_and_a_row_s(tmp_path: Path) -> None:
    assert Setup().with_settings(parse_settings(["speculation=0.6"])).speculation == 0.6
    for wrong in ("2", "-1", "much"):
        with pytest.raises(ConfigError, match="speculation is"):
            Setup().with_settings(parse_settings([f"speculation={wrong}"]))
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0, "input_tokens": 3, "output_tokens": 4, "speculation": 0.5}')
    assert read_trace(path)[0].speculation == 0.5
    path.write_text('{"at": 0, "input_tokens": 3, "output_tokens": 4, "speculation": 5}')
    with pytest.raises(TraceError, match=r"trace.jsonl:1: speculation is 5, must be"):
        read_trace(path)


def test_settings_by_name() -> None:
    changed = Setup().with_settings(parse_settings(["--max-num-seqs=7", "enable_prefix_caching=off", "itl_target=0.5"]))
    limits = changed.scheduler.limits
    assert (limits.max_num_seqs, limits.enable_prefix_caching, limits.itl_target) == (7, False, 0.5)
    assert setup({"settings": changed.settings()}, UNIT_STEPS) == changed
    assert setup({}, UNIT_STEPS).scheduler.limits.itl_target == 0.0  # no step of one unit could meet one
    assert setup({}, CostModel(step=0.01)).scheduler.limits.itl_target > 0.0
    for text in ("max_num_seqs", "nonsense=3", "max_num_seqs=many", "max_num_seqs=600", "scheduling_policy=best"):
        with pytest.raises(ConfigError):
            Setup().with_settings(parse_settings([text]))


def test_traces_of_our_own_and_of_servegen(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"at": 3.5, "input_tokens": 9, "output_tokens": 2, "tenant": "t", "blocks": [1], "block_tokens": 8}\n'
    )
    assert read_trace(own) == (
        TraceRow(at=0.0, input_tokens=9, output_tokens=2, tenant="t", blocks=(1,), block_tokens=8),
    )
    drawn = tmp_path / "clients.json"
    lengths = {"input_q5": [1, 5, 9], "output_q5": [2, 2, 4]}
    clients = [
        {"client": number, "pattern": pattern, "params": [0.9, 0.1], **lengths}
        for number, pattern in enumerate(("Gamma", "Weibull"), start=1)
    ]
    drawn.write_text(json.dumps({"window_s": 60, "clients": clients}))
    rows = read_trace(drawn)
    assert rows == read_trace(drawn)
    assert rows != read_trace(drawn, seed=1)
    assert {one.tenant for one in rows} == {"1", "2"}
    assert 900 < len(rows) < 1500
    assert {one.input_tokens for one in rows} == set(range(1, 10))


@pytest.mark.parametrize(
    ("policy", "tenants"), few([("wfq", True), ("fcfs", True), ("fcfs", False)], ("wfq", True), ("fcfs", False))
)
def test_a_flood_evicts_its_own_blocks(policy: str, tenants: bool) -> None:
    """A prompt of 1,040 tokens comes again and again; between, another tenant sends unique ones for twice the pool."""
    victim = [
        TraceRow(at=15.0 * i, input_tokens=1040, output_tokens=4, blocks=(7,), block_tokens=1024, tenant="victim")
        for i in range(20)
    ]
    flood = [row(at=15.0 * i + 0.5, inputs=160, outputs=2, tenant="flood") for i in range(20) for _ in range(60)]
    rows = sorted(victim + flood, key=lambda one: one.at)
    asked = Setup(cost=COST).with_settings(
        [("num_blocks", 300), ("max_model_len", 2048), ("scheduling_policy", policy)]
    )

    def of_the_victim(load: list[TraceRow]) -> tuple[float, float]:
        (found,) = (one for one in report(simulate(asked, load)).tenants if one.tenant == "victim")
        assert found.ttft_p50 is not None
        return found.cached, found.ttft_p50

    alone = of_the_victim([*victim, row(at=0.0, tenant="flood")])
    assert alone[0] > 0.9
    if tenants:
        flooded = of_the_victim(rows)
        assert flooded[0] >= 0.9 * alone[0]
        assert flooded[1] <= 1.2 * alone[1]
    else:  # as before tenants had shares
        assert of_the_victim([replace(one, scope="all") for one in rows])[0] < 0.1


def thrash(**changes: int) -> list[TraceRow]:
    return [replace(row(inputs=4, outputs=200 + 10 * (i % 9)), **changes) for i in range(24)]


@pytest.mark.parametrize("max_tokens", [None, 512])
def test_preemptions_and_what_they_cost(max_tokens: int | None) -> None:
    """By the prompt alone all enter at once; by expected growth, of lengths known or learned, fewer are preempted."""
    asked = Setup(cost=COST).with_settings([("num_blocks", 64), ("max_model_len", 900), ("admission", "prompt")])
    before = report(simulate(asked, thrash(max_tokens=max_tokens)))
    after = report(simulate(asked.with_settings([("admission", "expected")]), thrash(max_tokens=max_tokens)))
    assert before.served == after.served == 24
    assert sum(before.preemptions_by_cause.values()) == before.preemptions
    assert before.most_preemptions > 1
    assert before.recomputed == pytest.approx(before.recomputed_tokens / before.computed_tokens)
    assert before.computed_tokens - before.recomputed_tokens == after.computed_tokens - after.recomputed_tokens
    assert after.preemptions < before.preemptions / 2
    assert after.recomputed < before.recomputed


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_stop_token_ends_outputs_below_max_tokens(plans_ahead: bool) -> None:
    config = SchedulerConfig(num_blocks=99, max_model_len=64, plans_ahead=plans_ahead)
    asked = Setup(scheduler=config, cost=COST)
    rows = [row(inputs=10, outputs=outputs) for outputs in (1, 2, 30, 54)]
    declared = [replace(one, max_tokens=40) for one in rows]
    found = simulate(asked, declared)
    assert [one.num_tokens for one in found.done] == [1, 2, 30, 54]
    assert [as_request(one, 0, at=0.0, max_model_len=64).stop.max_new_tokens for one in declared] == [40, 40, 40, 54]
    assert as_request(replace(rows[0], max_tokens=900), 0, at=0.0, max_model_len=64).stop.max_new_tokens == 54


def test_equal_prompts_have_outputs_of_their_own() -> None:
    """Their blocks would be held once otherwise, which no server could do."""
    rows = [replace(row(inputs=32, outputs=64), blocks=(1,), block_tokens=32) for _ in range(8)]
    for leaps in (True, False):
        simulation = Simulation(Setup(cost=COST), leaps=leaps)
        assert simulation.run(rows).peak_blocks >= 2 + 7 * 4


def test_pictures_show_the_peak() -> None:
    rows = rows_of((32, 128, 64, 256), (0, 2, 4, 6))
    outcome = simulate(exercise_setup(rows), rows)
    picture = svg(outcome, title="a < b", static_blocks=64)
    assert "peak 16 blocks, step 118" in picture
    assert "static slots 64 blocks" in picture
    assert "a &lt; b" in picture
    lines = terminal(outcome, width=40, height=4)
    assert lines[0].strip().startswith("16")
    assert "█" in lines[0]


def test_a_comparison_names_what_changed() -> None:
    found = compare({"a": {"b": 1, "c": 2}, "d": 5, "e": None}, {"a": {"b": 2, "c": 2}, "d": 5, "e": 1, "f": 1})
    assert [(one.name, one.before, one.after, one.ratio) for one in found] == [("a.b", 1.0, 2.0, 2.0)]
