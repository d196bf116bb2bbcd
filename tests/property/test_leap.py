"""Steps taken at once leave the scheduler, and every request's times, as single steps do: to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quire_bench.traces import TraceRow
from quire_engine.cost_model import CostModel
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import Simulation
from support.scheduler_model import order_of_reuse

COST = CostModel(step=0.01, row=0.0003, context=1.7e-6, prompt=((1, 0.01), (64, 0.05)), chunk_context=1e-6)
ROWS = st.builds(
    TraceRow,
    at=st.floats(0, 5),
    input_tokens=st.integers(1, 90) | st.integers(100, 220),
    output_tokens=st.integers(1, 120),
    blocks=st.lists(st.integers(0, 3), max_size=4).map(tuple),
    block_tokens=st.just(20),
    max_tokens=st.sampled_from([None, 1, 150, 10_000]),
    tenant=st.sampled_from(["", "other"]),
)


def state(simulation: Simulation) -> tuple[Any, ...]:
    outcome, kv = simulation.outcome, simulation._scheduler._kv
    requests = [
        (r.number, r.refused, r.queue_seconds, r.first_at, r.last_at, r.num_tokens, r.cached_tokens, r.preemptions)
        for r in outcome.requests
    ]
    counts = (outcome.steps, outcome.peak_blocks, outcome.peak_step, outcome.block_steps)
    preempted = (outcome.total_preemptions, outcome.preemptions_by_cause, outcome.recomputed_tokens)
    blocks = (order_of_reuse(kv._pool), dict(kv._cache._hash_of), kv.total_kv_evictions)
    return requests, counts, preempted, sorted(outcome.gaps), blocks, simulation._scheduler._step, outcome.live


@settings(max_examples=9, deadline=None)  # `make property-test` draws many times as many
@given(
    rows=st.lists(ROWS, min_size=1, max_size=12),
    num_blocks=st.integers(22, 60),
    max_num_seqs=st.integers(1, 6),
    policies=st.tuples(st.sampled_from(["fcfs", "priority", "wfq"]), st.sampled_from(["prompt", "expected"])),
    elder_age=st.sampled_from([0, 64]),
    chunk=st.sampled_from([17, 48]),
    itl_target=st.sampled_from([0.0, 0.02, 0.1]),
    columns_from=st.sampled_from([None, 1, 3]),
    plans_ahead=st.booleans(),
)
def test_a_leap_is_so_many_steps(
    *,
    rows: list[TraceRow],
    num_blocks: int,
    max_num_seqs: int,
    policies: tuple[str, str],
    elder_age: int,
    chunk: int,
    itl_target: float,
    columns_from: int | None,
    plans_ahead: bool,
) -> None:
    asked = replace(Setup(), cost=COST, max_num_queued_reqs=6).with_settings(
        [
            *(("num_blocks", num_blocks), ("max_model_len", 352), ("max_num_seqs", max_num_seqs)),
            *(("max_num_batched_tokens", 64), ("prefill_chunk", chunk), ("scheduling_policy", policies[0])),
            *(("elder_age_steps", elder_age), ("itl_target", itl_target)),
            ("admission", policies[1]),
        ]
    )
    rows = sorted(rows, key=lambda row: row.at)
    asked = replace(asked, scheduler=replace(asked.scheduler, plans_ahead=plans_ahead))
    by_leaps = Simulation(asked, columns_from=columns_from)
    by_steps = Simulation(asked, leaps=False, columns_from=None)
    by_leaps.run(rows)
    by_steps.run(rows)
    by_leaps._scheduler.check_invariants()
    for mine, other in zip(state(by_leaps), state(by_steps), strict=True):
        assert mine == other
    assert by_leaps._scheduler._itl.__dict__ == by_steps._scheduler._itl.__dict__
    assert accounts(by_leaps) == accounts(by_steps)


def accounts(simulation: Simulation) -> list[tuple[Any, ...]]:
    tenants = simulation._scheduler._planner.accounts._by_tenant.values()
    each = [account for tenant in tenants for account in (tenant, *tenant.sizes.values())]
    return [(one.tenant, one.virtual, one.begun_tokens, one.prompt_tokens, one.output_tokens) for one in each]


def test_leaps_are_taken() -> None:
    """Else the property above says nothing."""
    asked = replace(Setup(), cost=COST)
    simulation, leapt = Simulation(asked), []
    take = simulation._leap
    simulation._leap = lambda due: leapt.append(take(due)) or leapt[-1]  # type: ignore[method-assign]
    simulation.run([TraceRow(at=float(i), input_tokens=20, output_tokens=100) for i in range(5)])
    assert sum(leapt) >= 5
    assert simulation.outcome.steps > 10 * len(leapt)


def test_leaps_out_of_the_columns_are_taken() -> None:
    """Where they are long; all sequences but the elder are in the columns again afterwards."""
    asked = replace(Setup(), cost=COST, max_num_queued_reqs=100).with_settings([("max_num_seqs", 24)])
    simulation, in_columns = Simulation(asked), []
    take = simulation._leap
    simulation._leap = lambda due: take(due) and (in_columns.append(len(simulation._scheduler._decodes)) or True)  # type: ignore[method-assign]
    simulation.run([TraceRow(at=0.0, input_tokens=20, output_tokens=100 + 20 * (i % 24)) for i in range(48)])
    assert in_columns[:3] == [23, 23, 23]
    assert simulation.outcome.steps > 4 * len(in_columns)


def test_leaps_beside_a_prompt_are_taken() -> None:
    """All its chunks but the last, though others decode."""
    asked = replace(Setup(), cost=COST).with_settings([("max_num_batched_tokens", 128), ("prefill_chunk", 48)])
    simulation, plans = Simulation(asked), []
    schedule = simulation._scheduler.schedule
    simulation._scheduler.schedule = lambda now: plans.append(now) or schedule(now)  # type: ignore[method-assign]
    simulation.run(
        [TraceRow(at=0.0, input_tokens=20, output_tokens=200), TraceRow(at=1, input_tokens=960, output_tokens=1)]
    )
    assert simulation.outcome.steps >= 200
    assert len(plans) < 10
