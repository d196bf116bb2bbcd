"""Steps with prompts as graphs: which size serves a step, what is added to it, what a fault there would do."""

from __future__ import annotations

import pytest

from quire_engine.execution.gpu import forward, graphs, launches
from quire_engine.execution.gpu.forward import pad_mixed
from quire_engine.execution.gpu.graphs import MixedBucket, StepGraphs
from quire_engine.execution.gpu.step_arrays import StepArrays
from quire_engine.execution.gpu.tables import SlotTables
from support.both_runners import Both
from support.model_steps import CPU, random_ids
from support.simulated_device import SimulatedDevice
from support.step_stories import ahead


def told(**options) -> Both:
    """Prompts in chunks beside decodes, steps in which nothing is sampled, forks."""
    both = Both(seed=41, mixed_rows=512, **options)
    both.story.add(0, random_ids(25, 0), 6, temperature=0.8, seed=1)
    both.story.step()  # a chunk alone
    both.story.add(1, random_ids(14, 1), 5, num_logprobs=1)
    both.story.step()
    both.story.add(2, random_ids(3, 2), 5, temperature=1.0, seed=5, forks=(10, 11))
    both.story.run()
    return both


def of_prompts(both: Both) -> list[MixedBucket]:
    return [bucket for bucket in both.runner._graphs._captured if isinstance(bucket, MixedBucket)]


def test_they_serve_a_story():
    both = told()
    both.check()
    assert of_prompts(both)
    replays = both.device.replays
    both.check()
    assert both.device.replays >= replays + len(both.story.steps), "every step has its graph now"


def test_nobody_waits_for_them():
    both = Both(seed=43, mixed_rows=512)
    both.story.add(0, random_ids(25, 0), 9, temperature=0.8, seed=1)
    both.story.add(1, random_ids(14, 1), 4, num_logprobs=1)
    both.story.run()
    both.check()
    assert of_prompts(both)
    for batch, _ in ahead(both.story.steps):
        before = both.device.sent, len(both.device.waits), both.device.pageable
        both.executor.launch(batch)
        assert (both.device.sent, len(both.device.waits), both.device.pageable) == (before[0] + 1, *before[1:])
        if len(both.executor._in_flight) == both.executor.max_in_flight:
            both.executor.collect()


def test_the_largest_is_captured_at_the_start():
    both = told()
    both.executor.capture_largest()
    assert of_prompts(both) == [both.runner._graphs.largest_mixed] == [MixedBucket(512, 8, 512)]
    both.check()


def test_prompts_that_are_scored_or_pooled_have_none():
    """All of their rows are asked for."""
    both = Both(seed=42, mixed_rows=512)
    both.story.add(0, random_ids(12, 0), 1, num_prompt_logprobs=1)
    both.story.pool(1, random_ids(9, 1), "mean")
    both.story.run()
    both.check()
    assert not of_prompts(both)


def test_there_are_only_so_many(monkeypatch, caplog):
    monkeypatch.setattr(graphs, "_MOST_MIXED", 1)
    both = told()
    both.check()
    assert len(of_prompts(both)) == 1
    assert "1 of them of steps with prompts" in caplog.text


def sizes(**options: int) -> StepGraphs:
    return StepGraphs(SimulatedDevice(), **{"max_rows": 64, "max_context": 1000, "mixed_rows": 600, **options})


@pytest.mark.parametrize(
    ("step", "bucket"),
    [
        ((1, 1, 1), MixedBucket(16, 2, 256)),
        ((16, 2, 256), MixedBucket(16, 2, 256)),
        ((17, 3, 257), MixedBucket(32, 8, 1000)),
        ((30, 20, 5), MixedBucket(64, 32, 256)),  # more rows than sequences, so that offsets of sample rows are sent
        ((600, 64, 1000), MixedBucket(768, 128, 1000)),
        ((769, 2, 5), None),
        ((5, 129, 5), None),
        ((5, 2, 1001), None),
    ],
)
def test_the_smallest_that_holds_a_step(step, bucket):
    assert sizes().mixed_bucket(*step) == bucket


def test_there_are_none_where_kernels_do_not_take_them():
    none = sizes(mixed_rows=0)
    assert none.mixed_bucket(3, 2, 3) is None
    assert none.largest_mixed is None
    assert sizes().largest_mixed == MixedBucket(768, 128, 1000)
    assert sizes(max_rows=600).largest_mixed == MixedBucket(768, 512, 1000)


def test_what_is_added_to_a_step():
    tables = SlotTables(num_slots=4, max_blocks=2, vocab_size=9, spare_block=7, device=CPU)
    arrays = StepArrays()
    step = arrays.step
    step.ids.extend([3, 4, 5])
    arrays.source.extend([20, 21, 22])
    step.positions.extend([0, 1, 6])
    step.kv_slots.extend([32, 33, 6])
    arrays.table_slots.extend([1, 0])
    step.query_starts.extend([2, 3])
    step.context_lens.extend([2, 7])
    step.sample_rows.append(2)
    step.sampled_starts.extend([0, 1])
    pad_mixed(arrays, 6, 4, tables, range(112, 114), 20)
    assert list(step.ids) == [3, 4, 5, 0, 0, 0]
    assert list(arrays.source) == [20, 21, 22, 23, 24, 25]
    assert list(step.positions) == [0, 1, 6, 0, 0, 0]
    assert list(step.kv_slots) == [32, 33, 6, 112, 113, 112]
    assert list(arrays.table_slots) == [1, 0, 4, 4]
    assert list(step.query_starts) == [0, 2, 3, 3, 3]
    assert list(step.context_lens) == [2, 7, 1, 1]
    assert list(step.sample_rows) == [2, 0, 0, 0]
    assert list(step.sampled_starts) == [0, 0, 1, 1, 1]
    assert not step.choices


def fails(both: Both) -> None:
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        both.check()


def test_planted_rows_that_write_to_somebody_s_block(monkeypatch):
    def astray(arrays, num_rows, num_sequences, tables, *rest):
        forward.pad_mixed(arrays, num_rows, num_sequences, tables, [arrays.step.kv_slots[0]], rest[-1])

    monkeypatch.setattr(launches, "pad_mixed", astray)
    fails(told())


def test_planted_rows_that_are_a_sequence_s(monkeypatch):
    def claimed(arrays, num_rows, *rest):
        pad_mixed(arrays, num_rows, *rest)
        arrays.step.query_starts[-1] = num_rows

    monkeypatch.setattr(launches, "pad_mixed", claimed)
    fails(told())


def test_planted_contexts_that_are_longer_than_their_graph(monkeypatch):
    monkeypatch.setattr(graphs, "_SHORTEST", 16)
    told().check()
    mixed_bucket = StepGraphs.mixed_bucket
    monkeypatch.setattr(StepGraphs, "mixed_bucket", lambda self, rows, count, _: mixed_bucket(self, rows, count, 16))
    fails(told())
