"""The runner in a thread: order, pending tokens, failures."""

from __future__ import annotations

import threading

import pytest

from quire_engine.batch import PENDING, Batch, SampledToken, ScheduledSequence, StepResult
from quire_engine.execution.threaded import ThreadedRunner
from quire_engine.types import SamplingParams, StopParams


class Recording:
    """Answers each item with its last token plus one; fails or starves those it is told to."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.gate = threading.Semaphore(100)
        self.bad: set[int] = set()
        self.starved: set[int] = set()

    def execute(self, batch: Batch) -> StepResult:
        self.gate.acquire()
        self.batches.append(batch)
        if batch.step_id == 13:
            raise MemoryError("no more")
        result = StepResult(starved={i.sequence_id for i in batch.items} & self.starved)
        for item in batch.items:
            if item.sequence_id in self.bad:
                result.samples[item.sequence_id] = (SampledToken(error="not a number"),)
            elif item.sequence_id not in result.starved:
                result.samples[item.sequence_id] = (SampledToken(token_id=item.token_ids[-1] + 1),)
        return result


def batch(step_id: int, *items: tuple[int, int]) -> Batch:
    """A step of decodes: (sequence id, token id) each."""
    return Batch(
        step_id=step_id,
        num_tokens=len(items),
        items=tuple(
            ScheduledSequence(
                sequence_id=sequence_id,
                choice=0,
                prompt_token_ids=(1,),
                output_token_ids=(),
                token_ids=(token_id,),
                start=1,
                block_ids=(0,),
                wants_sample=True,
                wants_prompt_logprobs=False,
                forks=(),
                sampling=SamplingParams(),
                stop=StopParams(max_new_tokens=9),
            )
            for sequence_id, token_id in items
        ),
    )


def test_a_step_is_launched_while_another_is_computed_and_gets_its_tokens() -> None:
    computing = Recording()
    computing.gate = threading.Semaphore(0)
    runner = ThreadedRunner(computing)
    runner.launch(batch(1, (7, 10), (8, 20)))
    runner.launch(batch(2, (8, PENDING), (7, PENDING), (9, 30)))
    computing.gate.release(2)
    assert runner.collect().samples[7] == (SampledToken(token_id=11),)
    assert {i: s[0].token_id for i, s in runner.collect().samples.items()} == {7: 12, 8: 22, 9: 31}


def test_what_failed_or_starved_is_left_out_of_the_step_behind() -> None:
    computing = Recording()
    computing.bad, computing.starved = {7}, {8}
    runner = ThreadedRunner(computing)
    runner.launch(batch(1, (7, 10), (8, 20), (9, 30)))
    runner.launch(batch(2, (7, PENDING), (8, PENDING), (9, PENDING)))
    first, second = runner.collect(), runner.collect()
    assert first.samples[7][0].error == "not a number"
    assert first.starved == {8}
    assert second.samples == {9: (SampledToken(token_id=32),)}
    assert (computing.batches[1].num_tokens, len(computing.batches[1].items)) == (1, 1)


def test_a_step_of_which_nothing_is_left_is_not_computed() -> None:
    computing = Recording()
    computing.bad = {7}
    runner = ThreadedRunner(computing)
    runner.launch(batch(1, (7, 10)))
    runner.launch(batch(2, (7, PENDING)))
    runner.collect()
    assert runner.collect() == StepResult()
    assert len(computing.batches) == 1


def test_what_no_item_can_be_blamed_for_is_raised_where_the_result_is_asked_for() -> None:
    runner = ThreadedRunner(Recording())
    runner.launch(batch(13, (7, 10)))
    with pytest.raises(MemoryError, match="no more"):
        runner.collect()
