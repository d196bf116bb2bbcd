"""Steps of so many rows are measured before the first request, for as long as there is time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.execution.drafting.row_costs import measured_rows


class Machine:
    """Steps on a clock of their own."""

    def __init__(self, seconds: Callable[[int, int], float], error: str | None = None) -> None:
        """`seconds`: by the step's rows and number."""
        self.seconds, self.error = seconds, error
        self.now, self.rows = 0.0, list[int]()

    def execute(self, batch: Batch) -> StepResult:
        (item,) = batch.items
        assert item.end <= len(item.block_ids) * 16
        assert batch.num_tokens == 1 + item.num_drafts
        assert batch.num_prefills == 0
        self.now += self.seconds(batch.num_tokens, len(self.rows))
        self.rows.append(batch.num_tokens)
        return StepResult(samples={item.sequence_id: (SampledToken(error=self.error),)})

    def measure(self, config: SchedulerConfig) -> dict[int, float]:
        return measured_rows(self.execute, config, config.limits.max_num_batched_tokens, clock=lambda: self.now)


def config(num_blocks: int = 100, **limits: int) -> SchedulerConfig:
    return SchedulerConfig(num_blocks=num_blocks, limits=SchedulerLimits(block_size=16, **limits))


def test_the_shortest_of_three_rounds_counts():
    machine = Machine(lambda rows, step: (1e-3 + 1e-4 * rows) * (50 if step < 3 else 1 + 0.1 * (step % 2)))
    found = machine.measure(config())
    assert found == {rows: pytest.approx(1e-3 + 1e-4 * rows) for rows in found}
    assert sorted(found)[:8] == list(range(1, 9))
    assert max(found) == 64
    assert machine.rows.count(6) == 3


def test_a_slow_model_is_measured_for_a_second_from_one_row_on():
    machine = Machine(lambda rows, step: 0.3)
    assert machine.measure(config()) == {
        1: pytest.approx(0.3),
        2: pytest.approx(0.3),
        3: pytest.approx(0.3),
        4: pytest.approx(0.3),
    }
    assert machine.rows == [1, 1, 2, 3, 4]
    machine = Machine(lambda rows, step: 9.0)
    assert machine.measure(config()) == {1: 9.0}


def test_no_step_is_larger_than_the_pool_or_the_budget_allows():
    assert max(Machine(lambda rows, step: 1e-3).measure(config(num_blocks=1))) == 13
    assert max(Machine(lambda rows, step: 1e-3).measure(config(max_num_batched_tokens=40))) == 36


def test_of_a_failing_model_nothing_is_known():
    machine = Machine(lambda rows, step: 1e-3, error="it is broken")
    assert machine.measure(config()) == {}
    assert machine.rows == [1]
