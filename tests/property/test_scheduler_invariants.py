"""What the scheduler's machine rests on: its executor sees a wrong block, and every invariant has a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from property import test_scheduler_machine
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.scheduling.scheduler import Scheduler
from support import scheduler_model
from support.fake_executor import CorruptKV, FakeExecutor, Run, request


def test_a_wrong_block_is_noticed() -> None:
    """The executor's check can fail: two sequences that write the same block corrupt each other."""
    run = Run(scheduler=Scheduler(SchedulerConfig(num_blocks=8)), executor=FakeExecutor(16))
    run.add(request("a", 8, 8), request("b", 8, 8))
    run.one_step()
    first, second = run.scheduler._roster.sequences.values()
    second.kv.table.replace(0, first.kv.table.block_ids[0])
    batch = run.scheduler.schedule(1.0)
    assert batch is not None
    with pytest.raises(CorruptKV):
        run.executor.execute(batch)


def test_every_number_that_is_cited_is_defined_and_every_defined_one_cited() -> None:
    defined = set(re.findall(r"^ +(I\d+)\b", Scheduler.check_invariants.__doc__ or "", re.MULTILINE))
    beside = [Path(__file__).with_name(name) for name in ("test_step_log_replay.py", "test_swapping.py")]
    files = (test_scheduler_machine.__file__, scheduler_model.__file__, *beside)
    text = "".join(Path(path).read_text(encoding="utf-8") for path in files)
    cited = set(re.findall(r"\bI\d+\b", text))
    assert cited == defined
