"""Memory without pages: what is reserved and empty, and holes that are each too short."""

from __future__ import annotations

from dataclasses import replace

from quire_bench.traces import TraceRow
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_lab.simulation.contiguous import Picture, drawn, simulate_contiguous
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate

LIMITS = SchedulerLimits(
    block_size=4,
    max_num_seqs=8,
    admission="prompt",
    max_num_batched_tokens=64,
    enable_prefix_caching=False,
    itl_target=0.0,
)
SETUP = Setup(scheduler=SchedulerConfig(num_blocks=10, max_model_len=64, limits=LIMITS))  # 40 slots


def row(at: float, prompt: int, output: int, most: int | None = None) -> TraceRow:
    return TraceRow(at=at, input_tokens=prompt, output_tokens=output, max_tokens=most)


def test_one_request_alone_is_served_as_with_pages():
    rows = [row(0.0, 10, 5)]
    found, paged = simulate_contiguous(SETUP, rows), simulate(SETUP, rows)
    assert (found.outcome.steps, found.outcome.seconds) == (paged.steps, paged.seconds) == (5, 5.0)
    assert found.outcome.requests[0].ttft == paged.requests[0].ttft
    assert found.slot_steps == 5 * 14
    assert found.token_steps == 10 + 11 + 12 + 13 + 14
    assert (found.steps_short, found.steps_at_holes, found.worst) == (0, 0, None)


def test_a_limit_that_is_not_used_is_reserved_all_the_same():
    rows = [row(0.0, 4, 2, most=33), row(0.0, 4, 2, most=33)]
    found, paged = simulate_contiguous(SETUP, rows), simulate(SETUP, rows)
    assert found.outcome.steps == 4, "one after the other: each reserves 36 of the 40 slots"
    assert found.steps_short == 2
    assert paged.steps == 2
    assert found.efficiency < 0.15


def test_free_slots_in_holes_are_of_no_use():
    # a, b and c take 12 slots each and leave 4; b ends early, and d needs 16: 12 in the middle and 4 at the end.
    rows = [row(0.0, 4, 9), row(0.0, 10, 3), row(0.0, 4, 9), row(3.0, 4, 13)]
    found, paged = simulate_contiguous(SETUP, rows), simulate(SETUP, rows)
    assert found.steps_at_holes == 6
    assert found.worst is not None
    assert found.worst.holes == [(12, 12), (36, 4)]
    assert found.worst.step == 3
    assert found.outcome.steps > paged.steps
    picture = drawn(found.worst, width=40, rows=1)
    assert picture == ["██████░░░░░░············██████░░░░░░····"]


def test_the_whole_load_is_served_and_what_is_too_long_is_refused():
    rows = [row(float(i), 3 + i % 7, 2 + i % 5) for i in range(40)] + [row(41.0, 30, 20)]
    found = simulate_contiguous(SETUP, rows)
    served = [one for one in found.outcome.requests if not one.refused]
    assert len(served) == 40
    assert all(one.num_tokens == one.row.output_tokens for one in served)
    (refused,) = [one for one in found.outcome.requests if one.refused]
    assert "49 slots are needed, 40 are there" in refused.why


def test_steps_keep_to_the_budget_and_the_seats():
    narrow = replace(
        SETUP, scheduler=replace(SETUP.scheduler, limits=replace(LIMITS, max_num_seqs=1, max_num_batched_tokens=17))
    )
    found = simulate_contiguous(narrow, [row(0.0, 30, 2), row(0.0, 3, 1)])
    assert found.outcome.steps == 4, "two for the prompt, one for the second token, one for the other request"
    assert (found.steps_short, found.steps_at_holes) == (0, 0)


def test_a_large_memory_is_drawn_in_as_few_cells():
    picture = Picture(num_slots=1000, step=0, runs=((0, 500, 100), (600, 100, 100)))
    lines = drawn(picture, width=10, rows=2)
    assert [len(line) for line in lines] == [10, 10]
    assert lines == ["██░░░░░░░░", "··██······"]
