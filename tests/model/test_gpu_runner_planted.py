"""Bugs planted in the GPU's runner are found: by wrong tokens, by the simulated device, by a launch too small."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from quire_engine.execution.gpu import device, forward, graphs, launches, pipeline, runner, step_arrays, tables
from support.both_runners import Both
from support.model_steps import random_ids
from support.simulated_device import SimulatedDevice


def told(**options) -> Both:
    """A story that needs everything: prompts in chunks, decodes across blocks, a graph used often."""
    both = Both(seed=11, **options)
    both.story.add(0, random_ids(14, 0), 8)
    both.story.add(1, random_ids(12, 1), 10, temperature=0.9, seed=4)
    both.story.add(2, random_ids(30, 2), 4, num_logprobs=1)
    both.story.run()
    return both


def fails(both: Both) -> None:
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        both.check()


def test_nothing_is_found_where_nothing_is_planted():
    told().check()


def test_a_host_buffer_that_is_written_too_early(monkeypatch):
    monkeypatch.setattr(device.PackedInput, "_next", lambda self: self._slots[0])
    fails(told())


def test_one_host_buffer_that_is_waited_for():
    """What the planted bug above leaves out is all that it takes."""
    both = told(num_buffers=1)
    both.check()
    assert both.device.waits.count("event") > len(both.story.steps)


def test_a_result_that_is_read_too_early(monkeypatch):
    read, at_once = pipeline.IssuedStep.result, SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(pipeline.IssuedStep, "result", lambda self: read(replace(self, done=at_once)))
    fails(told())


def test_a_block_that_is_not_sent(monkeypatch):
    sent = tables.SlotTables.take_deltas

    def late(self):
        deltas = sent(self)
        return {name: values[:-1] if name.startswith("cell") else values for name, values in deltas.items()}

    monkeypatch.setattr(tables.SlotTables, "take_deltas", late)
    fails(told())


def test_a_table_that_is_believed_to_be_up_to_date(monkeypatch):
    def preempted() -> Both:
        both = Both(seed=12)
        both.story.add(0, random_ids(20, 0), 10)
        both.story.add(1, random_ids(20, 1), 10)
        for _ in range(4):
            both.story.step()
        both.story.preempt(0)
        both.story.run()
        return both

    preempted().check()
    place = tables.SlotTables.place

    def append_only(self, sequence_id, block_ids):
        known = self._held[sequence_id].block_ids
        place(self, sequence_id, (*known, *block_ids[len(known) :]))

    monkeypatch.setattr(tables.SlotTables, "place", append_only)
    fails(preempted())


def test_a_failed_step_whose_changes_are_believed_to_have_arrived(monkeypatch):
    def failing() -> Both:
        both = Both(seed=13)
        send, numbers = both.runner._resident._input.send, count(1)

        def send_but_once(arrays):
            if next(numbers) == 1:
                raise RuntimeError("planted")
            return send(arrays)

        both.runner._resident._input.send = send_but_once
        both.story.add(0, random_ids(20, 0), 8)
        both.story.add(1, random_ids(9, 1), 12)
        both.story.run()
        return both

    failing().check()
    monkeypatch.setattr(tables.SlotTables, "forget", lambda self: self.take_deltas())
    fails(failing())


@pytest.mark.parametrize("wrong", [1, -1])
def test_a_pending_token_that_is_somebody_else_s(monkeypatch, wrong):
    def shifted(step, tables, max_model_len, sampled, first_word):
        wrongly = {sequence_id: word + wrong for sequence_id, word in sampled.items()}
        return step_arrays.build_step_arrays(step, tables, max_model_len, wrongly, first_word)

    monkeypatch.setattr(runner, "build_step_arrays", shifted)
    fails(told())


def test_contexts_that_are_longer_than_their_graph(monkeypatch):
    monkeypatch.setattr(graphs, "_SHORTEST", 16)
    told().check()
    monkeypatch.setattr(graphs.StepGraphs, "bucket", lambda self, rows, _, flags: graphs.Bucket(4, 16, flags))
    fails(told())


def test_a_graph_whose_memory_was_replaced(caplog):
    both = told()
    both.check()
    with both.device.work(), torch.inference_mode():
        both.runner._tables.blocks = both.runner._tables.blocks.clone()
    fails(both)
    assert "memory which is not there any more" in caplog.text


def test_rows_that_fill_a_bucket_and_write_to_somebody_s_block(monkeypatch):
    """Three sequences in a bucket of four."""
    pad = forward.pad_decodes

    def astray(arrays, num_rows, held, spare_slots, first_word):
        pad(arrays, num_rows, held, [arrays.step.kv_slots[0]], first_word)

    monkeypatch.setattr(launches, "pad_decodes", astray)
    fails(told())


def test_logits_that_are_kept_from_one_replay_to_the_next(monkeypatch):
    """The graph's memory is poison again when the next step begins."""
    run, kept = graphs.StepGraphs.run, []

    def stale(self, bucket, compute):
        kept.append(run(self, bucket, compute))
        return kept[-2] if len(kept) > 1 and kept[-2].shape == kept[-1].shape else kept[-1]

    monkeypatch.setattr(graphs.StepGraphs, "run", stale)
    both = told()
    monkeypatch.setattr(SimulatedDevice, "borrow", lambda self, tensor: tensor.clone())
    fails(both)
