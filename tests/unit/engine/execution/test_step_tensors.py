"""The record of a step: what follows from a batch before any tensor is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_engine.contract.batch import PENDING, Fork, ScheduledSequence
from quire_engine.contract.types import Pooling, SamplingParams
from quire_engine.execution.step_tensors import StepTensors, step_tensors
from support.model_steps import batch_of, scheduled

IDS = list(range(20, 60))
BLOCKS = [5, 2, 9, 7]


def part(start: int, num_tokens: int, **changes: object) -> ScheduledSequence:
    return replace(scheduled(IDS, BLOCKS, start, num_tokens, all_logits=False), **changes)  # type: ignore[arg-type]


def record(*items: ScheduledSequence) -> StepTensors:
    return step_tensors(batch_of(*items), 16, 64)


def test_drafts_that_cannot_be_right_have_no_row() -> None:
    item = replace(part(33, 1), token_ids=(53, 7, 64, 8), num_drafts=3)
    assert list(record(item).ids) == [53, 7]  # 64 is outside the vocabulary, and 8 behind it
    known = replace(part(33, 1), token_ids=(53, 7, 9, 8), num_drafts=3)
    for most in range(4):
        step = step_tensors(batch_of(part(20, 2, sequence_id=1), known), 16, 64, lambda _, most=most: most)  # type: ignore[misc]
        assert list(step.ids)[2:] == [53, 7, 9, 8][: 1 + most]
        assert [choice.position for choice in step.choices][1:] == list(range(34, 35 + most))


def test_rows_and_what_is_asked_of_them() -> None:
    forks = (Fork(sequence_id=8, choice=1), Fork(sequence_id=9, choice=2))
    scored = part(0, 3, sequence_id=2, wants_prompt_logprobs=True, wants_sample=False)
    step = record(part(14, 4, sequence_id=1, wants_sample=False), scored, part(33, 1, sequence_id=3, forks=forks))
    assert list(step.ids) == [34, 35, 36, 37, 20, 21, 22, 53]
    assert list(step.positions) == [14, 15, 16, 17, 0, 1, 2, 33]
    assert list(step.kv_slots) == [94, 95, 32, 33, 80, 81, 82, 145]
    assert (list(step.query_starts), list(step.sampled_starts)) == ([0, 4, 7, 8], [0, 0, 3, 4])
    assert (list(step.context_lens), list(step.sample_rows)) == ([18, 3, 34], [4, 5, 6, 7])
    assert (list(step.score_rows), list(step.score_ids), step.scored) == ([0, 1, 2], [21, 22, 23], [2])
    assert [(row.sequence_id, row.choice, row.logits_row, row.position) for row in step.choices] == [
        (3, 0, 3, 34),
        (8, 1, 3, 34),
        (9, 2, 3, 34),
    ]
    assert not any((step.rules, step.errors, step.told, step.pooled))


@pytest.mark.parametrize(("pooling", "rows"), [("mean", 3), ("last", 1)])
def test_rows_that_are_pooled_are_none_of_logits(pooling: Pooling, rows: int) -> None:
    wanted = part(0, 3, wants_sample=False, pooling=pooling)
    step = record(part(5, 1), wanted, part(6, 1))
    assert [each.rows for each in step.pooled] == [slice(1, 1 + rows)]
    assert (len(step.sample_rows), step.num_logit_rows) == (2 + rows, 2)
    assert list(step.choice_rows) == [0, 1]
    assert list(step.asked()["logit_rows"]) == [0, 1 + rows]


def test_rules_errors_and_log_probabilities_by_index_of_the_choice() -> None:
    def asks(**sampling: object) -> ScheduledSequence:
        return part(5, 1, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]

    step = record(
        asks(temperature=0.5, top_k=3),
        asks(logit_bias=((3, 1.0),), num_logprobs=0),
        asks(banned_token_ids=(64,)),
        asks(logprob_token_ids=(-1,), num_logprobs=2),
        asks(min_tokens=1),
    )
    assert list(step.rules) == [1]  # the last has no stop token that may not come yet
    assert list(step.errors) == [2, 3]
    assert step.told == [1, 3]


def test_a_token_that_the_step_before_samples() -> None:
    step = record(part(5, 1), part(6, 1, sequence_id=4, token_ids=(PENDING,)))
    assert (list(step.ids), step.pending) == ([25, 0], {1: 4})


@pytest.mark.parametrize("token_ids", [(64,), (-2,), (3, PENDING), (3, 2**70)])
def test_an_id_outside_the_vocabulary_is_refused(token_ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary of 64"):
        record(part(5, 1), part(6, len(token_ids), token_ids=token_ids))


def test_so_is_one_to_score() -> None:
    prompt = (1, 2, 64)
    scored = part(0, 2, prompt_token_ids=prompt, token_ids=prompt[:2], wants_prompt_logprobs=True)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        record(scored)
