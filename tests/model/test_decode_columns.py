"""Decodes in columns bring what the same slices bring one by one, from both runners, and through the whole engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire_engine.contract.types import NON_FINITE
from quire_engine.execution.executor import Executor
from quire_engine.execution.runner import Runner
from support.both_runners import NAN, Both, check, models
from support.columns import Columns, flat
from support.covering import few
from support.model_steps import random_ids


def told(both: Both) -> None:
    """Greedy and drawn decodes that come and go beside prompts, and beside slices that no column takes."""
    both.story.add(0, random_ids(5, 0), 20)
    both.story.add(1, random_ids(20, 1), 12, temperature=0.8, seed=-5)
    both.story.add(2, random_ids(4, 2), 9, temperature=1.3, top_k=7, num_logprobs=3)
    both.story.add(3, random_ids(6, 3), 7, temperature=1.0, top_p=0.7, min_p=0.05, seed=8)
    both.story.add(4, random_ids(30, 4), 5)
    both.story.add(5, (*random_ids(3, 5), NAN), 5)
    for step in range(14):
        if step == 4:
            both.story.add(6, random_ids(9, 6), 18)
        if step == 6:
            both.story.add(7, random_ids(9, 7), 6, presence_penalty=0.5)
            both.story.preempt(0)
        both.story.step()
    both.story.run()


@pytest.mark.parametrize("mixed_rows", few([0, 512], 512))
def test_both_runners_compute_columns_as_they_compute_slices(mixed_rows: int) -> None:
    both = Both(mixed_rows=mixed_rows)
    told(both)
    steps, columns = both.story.steps, Columns()
    host, _ = models()
    executor = Executor(Runner(host.decoder, host.kv.tensor, 16, torch.device("cpu")), host.kv)
    num_columns = 0
    for step in steps:
        batch = columns.of(step.batch)
        result = executor.execute(batch)
        num_columns += result.decoded is not None
        assert flat(batch, result) == step.result
    assert num_columns > 20
    assert any(NON_FINITE in str(step.result.samples) for step in steps)
    check(both.executor, steps, columns=Columns())


def test_a_row_whose_token_is_no_index_fails_alone() -> None:
    both = Both()
    told(both)
    step = next(step for step in both.story.steps if sum(item.is_decode for item in step.batch.items) > 2)
    items = list(step.batch.items)
    at = next(at for at, item in enumerate(items) if item.is_decode)
    items[at] = replace(items[at], token_ids=(1 << 40,))
    batch = Columns().of(replace(step.batch, items=tuple(items)))
    host, _ = models()
    executor = Executor(Runner(host.decoder, host.kv.tensor, 16, torch.device("cpu")), host.kv)
    assert list(executor.execute(batch).errors) == [items[at].sequence_id]
