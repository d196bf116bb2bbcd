"""The policy that CONTRIBUTING.md shows, as it stands there, under the scheduler's machine and all its invariants."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize

from property.test_scheduler_machine import SchedulerMachine
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.scheduling.policies import ItlTarget
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, Run, request
from support.limits import scheduler_config
from support.scheduler_model import configs

CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
NUM_EXAMPLES = 20
NUM_STEPS = 40


def shown() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.split("## A policy of your own\n")[1], re.DOTALL)
    return str(code)


EXAMPLE: dict[str, Any] = {"__name__": "example"}
exec(shown(), EXAMPLE)


class ExampleMachine(SchedulerMachine):
    """As the other; a step takes a second, and with a target few prompt tokens fit beside decodes."""

    @initialize(config=configs())
    def start(self, config: SchedulerConfig) -> None:
        super().start(config)
        for run in (self.run, self.twin):
            chosen = EXAMPLE["policies"](config.limits)
            chosen = dataclasses.replace(chosen, itl=ItlTarget(config.limits.itl_target, fewest=1))
            run.scheduler = Scheduler(config, policies=chosen)


ExampleMachine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=NUM_STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestExample = ExampleMachine.TestCase


def test_it_is_short() -> None:
    assert len(shown().splitlines()) <= 40


def test_it_decides() -> None:
    config = scheduler_config(num_blocks=64, max_num_seqs=2)
    scheduler = Scheduler(config, policies=EXAMPLE["policies"](config.limits))
    run = Run(scheduler=scheduler, executor=FakeExecutor(config.limits.block_size))
    run.add(request("first", 8, 30), request("long", 8, 20), request("short", 8, 4))
    run.to_end()
    assert run.finish_step["short"] < run.finish_step["long"]


def test_who_has_most_left_gives_up_its_blocks() -> None:
    """And not the elder, though it has more left."""
    config = scheduler_config(num_blocks=6, block_size=4, max_model_len=24)
    scheduler = Scheduler(config, policies=EXAMPLE["policies"](config.limits))
    run = Run(scheduler=scheduler, executor=FakeExecutor(4))
    run.add(request("elder", 4, 18), request("much", 4, 12), request("little", 4, 6))
    preempted = []
    while run.scheduler.has_work:
        run.one_step()
        preempted += [group.request.request_id for group in run.scheduler._roster.waiting if group.state == "preempted"]
    assert preempted[0] == "much"
    assert "elder" not in preempted
