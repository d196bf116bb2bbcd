"""The time that an engine counts as spent in steps, by its own clock."""

from __future__ import annotations

import pytest

from quire_engine.contract.types import StepOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, request
from support.limits import scheduler_config


def test_steps_and_the_sending_of_their_outputs_count_and_the_time_between_does_not() -> None:
    now = 100.0
    busy: list[float] = []

    class Slow(FakeExecutor):
        def launch(self, batch) -> None:
            nonlocal now
            now += 0.5
            super().launch(batch)

    def send(step: StepOutput) -> None:
        nonlocal now
        now += 0.25
        busy.append(step.stats.total_busy_seconds)

    engine = Engine(Scheduler(scheduler_config(num_blocks=64)), Slow(16), clock=lambda: now)
    engine.on_step = send
    engine.submit(request("a", max_tokens=3))
    while engine.has_work:
        engine.step()
        now += 10.0
    # The sending of a step's outputs is counted from the step after it on, since it ends after them.
    assert busy == pytest.approx([0.5, 1.25, 2.0])
