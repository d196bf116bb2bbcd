"""Where a GPU's memory is too small: for a step, for one item, for a graph."""

from __future__ import annotations

import logging

import pytest
import torch

from quire_engine.execution.gpu import graphs
from support.both_runners import LIMITS, Both
from support.covering import few
from support.model_steps import random_ids
from support.step_stories import ahead


class Crowded:
    """A model whose device has memory for so many sequences a step, and none at all for prompts of `hopeless`."""

    def __init__(self, decoder, *, most: int, hopeless: int = -1, late: bool = False) -> None:
        self._decoder, self._most, self._hopeless, self._late = decoder, most, hopeless, late
        self.config, self.choose = decoder.config, decoder.choose
        self._sequences = 0

    def forward(self, step, kv):
        self._sequences = len(step.query_lens)
        if self._hopeless in step.query_lens or not self._late:
            self._allocate(self._hopeless in step.query_lens)
        return self._decoder.forward(step, kv)

    def logits(self, hidden):
        self._allocate(False)
        return self._decoder.logits(hidden)

    def _allocate(self, hopeless):
        if hopeless or self._sequences > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("late", few([False, True], True))
def test_a_step_that_is_too_large_is_computed_in_parts(late, caplog):
    both = Both(seed=31, wrap=lambda decoder: Crowded(decoder, most=1, late=late))
    for i in range(3):
        both.story.add(i, random_ids(4 + i, i), 4 + i, temperature=0.7, seed=i, num_logprobs=i)
    both.story.run()
    with caplog.at_level(logging.WARNING):
        both.check()
    assert both.device.released > 3
    assert "computed in parts" in caplog.text


def test_who_does_not_fit_alone_is_starved_and_the_others_go_on():
    both = Both(seed=32, wrap=lambda decoder: Crowded(decoder, most=9, hopeless=7))
    both.story.add(0, random_ids(5, 0), 5)
    both.story.add(1, random_ids(7, 1), 5)
    both.story.add(2, random_ids(6, 2), 5, temperature=1.0)
    both.story.run()
    right = both.story.steps
    first, second = (batch for batch, _ in ahead(right[:2]))
    both.executor.launch(first)
    both.executor.launch(second)  # its item of the starved sequence is computed from token 0, and dropped
    for told in right[:2]:
        result = both.executor.collect()
        assert result.starved == ({1} if told is right[0] else set())
        result.samples.pop(1, None)
        told.result.samples.pop(1)
        assert (result.samples, result.errors) == (told.result.samples, {})


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: capturing")])
def test_steps_that_cannot_be_captured_are_computed_eagerly(error, caplog):
    both = Both(seed=33)

    def full():
        raise error

    both.device.out_of_memory = full
    both.story.add(0, random_ids(5, 0), 8)
    both.story.add(1, random_ids(6, 1), 5, temperature=1.0, top_p=0.5)
    both.story.run()
    with caplog.at_level(logging.WARNING):
        both.check()
    assert both.device.captures == both.device.replays == 0
    assert len(caplog.records) == 1, "once, not once a step and not once a bucket"
    assert "without a graph" in caplog.text


def test_there_are_only_so_many_graphs(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    both = Both(seed=34)
    both.story.add(0, random_ids(5, 0), 8)
    both.story.add(1, random_ids(6, 1), 5, temperature=1.0)
    both.story.run()
    both.check()
    assert both.device.captures == 1
    assert both.device.replays


def test_the_largest_graph_serves_who_comes_later():
    both = Both(seed=35, chunk=300)
    both.executor.capture_largest()
    assert both.device.captures == 1
    for i in range(LIMITS.max_num_seqs):
        both.story.add(i, random_ids(3 if i else 290, 1 + i), 4, temperature=1.0, top_k=9, top_p=0.9, seed=50 + i)
    both.story.run()
    both.check()
    assert (both.device.captures, both.device.replays) == (1, 3)


def test_no_more_than_two_steps_are_in_flight():
    both = Both(seed=36)
    both.story.add(0, random_ids(5, 0), 8)
    both.story.run()
    batches = [batch for batch, _ in ahead(both.story.steps)]
    with pytest.raises(RuntimeError, match="no step"):
        both.executor.collect()
    both.executor.launch(batches[0])
    both.executor.launch(batches[1])
    with pytest.raises(RuntimeError, match="steps in flight: 2"):
        both.executor.launch(batches[2])
