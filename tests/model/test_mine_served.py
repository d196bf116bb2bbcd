"""A student's scheduler serves the embedded model beside ours and static batching: the same tokens, and a table."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.demo import demo_model_path
from quire_engine.tools.given_steps import answers
from quire_lab.mine.command import run
from quire_lab.mine.referee import Arrival, Machine
from quire_lab.mine.schedulers import ListPool, OurScheduler, PlainScheduler, StaticScheduler
from quire_lab.mine.serving import Bench, ModelProcess

STUDENTS = Path(__file__).parents[1] / "support" / "students"
SMALL = Machine(num_blocks=14, block_size=16, max_num_seqs=4, max_num_batched_tokens=64)
LOAD = [
    Arrival(request_id=f"r{i}", num_prompt=20 + 30 * (i % 3), max_new_tokens=60 - 9 * i, step=1 + i) for i in range(6)
]


def test_every_scheduler_gets_the_tokens_of_a_request_alone():
    with ModelProcess(demo_model_path(), SMALL) as model:
        bench = Bench(model, SMALL, LOAD, 256)
        alone = bench.alone()
        ours = bench.serve("ours", OurScheduler(SMALL))
        plain = bench.serve("plain", PlainScheduler(SMALL, ListPool(SMALL.num_blocks)))
        static = bench.serve("static", StaticScheduler(SMALL))
    assert ours.tokens == plain.tokens == static.tokens == alone
    assert all(len(alone[one.request_id]) == one.max_new_tokens for one in LOAD)
    assert plain.counts.preemptions > 0
    assert plain.counts.recomputed_tokens > 0
    assert ours.counts.steps < static.counts.steps
    assert min(one.model_seconds for one in (ours, plain, static)) > 0.0


@pytest.mark.matrix  # what is in them is tried beside it
def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire_lab.mine.command.serving_load", lambda: LOAD)
    assert run(["--mine", str(STUDENTS / "reserving.py")]) == 0
    said = capsys.readouterr().out
    assert "reserving.py: Scheduler: every invariant holds" in said
    for words in (
        "yours",
        "ours",
        "static",
        "steps to the first token, mean",
        "somebody waited who could have run",
        "6 of 6",
    ):
        assert words in said
    assert re.search(r"Yours takes \d+ steps (more|fewer) than ours|As many steps as ours", said)
    assert re.search(r"Yours makes [\d,]+ output tokens a second\.", said)
    assert re.search(r"│ output tokens a second +│( +[\d,]+ │){3}", said)


def test_given_steps_are_computed_or_refused():
    config = replace(
        EngineConfig(model=str(demo_model_path()), device="cpu", num_threads=1), kv_memory=1 << 20, max_model_len=256
    )
    steps = [
        {"add": {"a": {"prompt": [5, 6, 7], "max_new_tokens": 4}}, "slices": [["a", 2, [3]]]},
        {"slices": [["a", 1, [3]]]},
        {"slices": [["a", 1, [3]]]},
        {"preempted": ["a"], "slices": [["a", 5, [1]]]},  # what was computed and told, once more elsewhere
        {"slices": [["a", 9, [1]]]},
    ]
    replies = answers(iter([json.loads(json.dumps(asdict(config))), *steps]))
    assert next(replies)["block_size"] == 16
    assert [len(next(replies)["tokens"]) for _ in steps[:4]] == [0, 1, 1, 1]
    with pytest.raises(ConfigError, match="9 tokens, and 1 are left"):
        next(replies)
