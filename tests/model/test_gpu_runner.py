"""The GPU's runner on a simulated device gives, bit for bit, what the runner gives that is waited for."""

from __future__ import annotations

import random
from functools import partialmethod

import pytest

from quire_engine.contract.batch import PENDING
from quire_engine.contract.types import NO_CANDIDATE, NON_FINITE
from quire_engine.execution.gpu.graphs import MixedBucket
from support.both_runners import NAN, Both
from support.covering import few
from support.model_steps import random_ids
from support.step_stories import ahead


@pytest.fixture(autouse=True)
def mixed(request, monkeypatch):
    """Whether steps with prompts are graphs too."""
    asked = getattr(request, "param", True)
    monkeypatch.setattr(Both, "__init__", partialmethod(Both.__init__, mixed_rows=512 if asked else 0))
    return asked


@pytest.mark.parametrize("mixed", [True, False], indirect=True)
def test_decodes_and_prompts_in_chunks(mixed):
    both = Both()
    for i, length in enumerate((3, 17, 40, 1)):
        both.story.add(i, random_ids(length, i), 8 + i)
    both.story.run()
    padding = both.check()
    of_prompts = {bucket for bucket in both.runner._graphs._captured if isinstance(bucket, MixedBucket)}
    assert bool(of_prompts) == mixed
    assert both.device.replays > 4
    if mixed:
        assert max(padding) > 1, "steps of prompts have 16, 32, 64, ... rows"
    else:
        assert set(padding) == {0, 1}, "graphs have 1, 2, 4, ... rows: three sequences leave one over"


def test_every_way_to_choose():
    both = Both(seed=1)
    both.story.add(0, random_ids(5, 0), 7)
    both.story.add(1, random_ids(9, 1), 9, temperature=0.8, seed=-5)
    both.story.add(2, random_ids(4, 2), 8, temperature=1.3, top_k=7, seed=2**63 - 1, num_logprobs=3)
    both.story.add(3, random_ids(6, 3), 7, temperature=1.0, top_p=0.7, min_p=0.05, seed=8)
    both.story.add(4, random_ids(7, 4), 6, num_logprobs=0)
    both.story.add(5, random_ids(2, 5), 6, temperature=1e-6, top_k=3, num_logprobs=600)
    both.story.run()
    both.check()


@pytest.mark.parametrize("logits_rows", few([1, 3, 1000], 3))
def test_log_probabilities_of_certain_ids(logits_rows):
    both = Both(seed=3, logits_bytes=logits_rows * 4 * 512)
    for i, ids in enumerate([(1, 2, 3), (), (511,), tuple(range(128))]):
        both.story.add(i, random_ids(4, i), 5, logprob_token_ids=ids, num_logprobs=i % 3, temperature=0.5)
    both.story.add(4, random_ids(4, 4), 5, num_prompt_logprobs=2)
    both.story.add(5, random_ids(4, 5), 5)
    both.story.add(6, random_ids(4, 6), 5, logprob_token_ids=(512,), num_logprobs=0)
    both.story.run()
    both.check()


def test_rules_of_the_requests():
    both = Both(seed=2)
    both.story.add(0, random_ids(5, 0), 6, logit_bias=((7, 30.0), (9, -5.0)), num_logprobs=2)
    both.story.add(1, random_ids(6, 1), 6, allowed_token_ids=(3, 4, 5), temperature=1.0, seed=3)
    both.story.add(2, random_ids(7, 2), 6, min_tokens=4, logit_bias=((2, 50.0),))
    both.story.add(3, random_ids(8, 3), 7, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    both.story.add(4, random_ids(9, 4), 7, temperature=0.9, top_k=40)
    both.story.add(5, random_ids(3, 5), 3, allowed_token_ids=(3,), banned_token_ids=(3,))
    pairs = tuple((i, j) for i in range(0, 512, 3) for j in range(40))
    both.story.add(7, random_ids(5, 7), 9, banned_sequences=pairs, temperature=1.5, seed=1)
    both.story.add(6, random_ids(3, 6), 3, logit_bias=((10**6, 1.0),))
    both.story.run()
    first = both.story.steps[0].result
    assert first.samples[5][0].error == NO_CANDIDATE
    assert "logit_bias" in str(first.samples[6][0].error)
    both.check()


@pytest.mark.parametrize("logits_rows", few([1, 3, 1000], 3))
def test_prompts_that_are_scored(logits_rows):
    both = Both(seed=3, logits_bytes=logits_rows * 4 * 512)
    both.story.add(0, random_ids(25, 0), 3, num_prompt_logprobs=2, num_logprobs=1)
    both.story.add(1, random_ids(4, 1), 4, temperature=0.7, seed=1)
    both.story.add(2, random_ids(12, 2), 2, num_prompt_logprobs=0)
    both.story.add(3, [5, NAN, 6], 2, num_prompt_logprobs=1)
    both.story.add(4, random_ids(12, 2), 4, num_logprobs=4, logit_bias=((3, 3.0),))
    both.story.run()
    assert both.story.steps[0].result.errors == {3: NON_FINITE}
    both.check()


def test_a_prompt_s_last_row_is_scored_beside_decodes():
    both = Both(seed=9)
    both.story.add(0, random_ids(12, 0), 3, num_prompt_logprobs=1)
    both.story.add(1, random_ids(23, 1), 3, num_prompt_logprobs=1)
    both.story.add(2, random_ids(5, 2), 5)
    both.story.run()
    assert any(
        told.result.prompt_logprobs and all(item.num_tokens == 1 for item in told.batch.items)
        for told in both.story.steps
    )
    both.check()


def test_forks_and_copies_of_blocks():
    both = Both(seed=4)
    both.story.add(0, random_ids(20, 0), 6, temperature=1.0, seed=5, forks=(10, 11))
    both.story.add(1, random_ids(3, 1), 8)
    both.story.run()
    assert len(both.story.steps[1].result.samples) == 4
    both.check()


def test_rows_that_are_not_finite_end_alone():
    """And their blocks, full of NaN, are the next sequences'."""
    both = Both(seed=5)
    both.story.add(0, random_ids(5, 0), 6)
    both.story.add(1, [4, 5, NAN], 6, temperature=1.0, num_logprobs=2)
    both.story.add(2, [4, 5, 8], 6, logit_bias=((NAN, 100.0),))  # not finite from the second token on
    both.story.step()
    both.story.step()
    for i in range(3, 6):
        both.story.add(i, random_ids(18, i), 5)
    both.story.run()
    assert both.story.steps[0].result.samples[1][0].error == NON_FINITE
    assert both.story.steps[1].result.samples[2][0].error == NON_FINITE
    both.check()


def test_who_comes_back_in_other_blocks():
    both = Both(seed=6)
    for i in range(3):
        both.story.add(i, random_ids(14 + i, i), 12)
    for _ in range(5):
        both.story.step()
    both.story.preempt(1)
    both.story.run()
    both.check()


def test_more_sequences_than_slots_over_time():
    both = Both(seed=7)
    for i in range(20):
        both.story.add(i, random_ids(3 + i % 3, i), 2 + i % 4, temperature=0.5 * (i % 2), seed=i)
        both.story.step()
    both.story.run()
    both.check()


@pytest.mark.parametrize("bad", few([10**4, -7], 10**4))
def test_who_raises_fails_alone_between_two_steps_in_flight(bad):
    both = Both(seed=8)
    both.story.add(0, random_ids(5, 0), 8)
    both.story.add(1, random_ids(6, 1), 8, temperature=1.0)
    both.story.step()
    both.story.step()
    both.story.add(2, [3, bad, 5], 4)
    both.story.add(3, random_ids(4, 3), 5)
    both.story.run()
    assert set(both.story.steps[2].result.errors) == {2}
    both.check()


def test_more_changes_of_tables_than_a_step_holds():
    both = Both(seed=10, chunk=40)
    both.runner._resident.max_cells = 2
    both.story.add(0, random_ids(60, 0), 4)
    both.story.add(1, random_ids(45, 1), 4)
    both.story.run()
    both.check()
    assert both.device.sent > len(both.story.steps)


def test_a_pending_token_that_nobody_samples_is_an_error_of_its_item():
    both = Both(seed=14)
    both.story.add(0, random_ids(5, 0), 4)
    both.story.add(1, random_ids(6, 1), 4)
    both.story.run()
    (_, (batch, _), *_) = ahead(both.story.steps)
    assert batch.items[0].token_ids == (PENDING,)
    result = both.executor.execute(batch)
    assert set(result.errors) == {0, 1}


NUM_STORIES = 3  # raise it for a long run


@pytest.mark.parametrize("mixed", few([True, False], True), indirect=True)
@pytest.mark.parametrize("seed", few(range(NUM_STORIES), 0))
def test_random_stories(seed, mixed):
    """Sequences of every kind come, fail, are preempted and go, in whatever order."""
    dice = random.Random(seed)
    both = Both(seed=seed, chunk=dice.choice([3, 11, 40]), logits_bytes=dice.choice([1, 3, 9]) * 4 * 512)
    kinds: tuple[dict[str, object], ...] = (
        {},
        {"temperature": 0.9},
        {"temperature": 1.1, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02, "num_logprobs": 2},
        {"num_logprobs": 1, "num_prompt_logprobs": 2},
        {"logit_bias": ((3, 2.0), (NAN, 1.0))},
        {"temperature": 0.8, "repetition_penalty": 1.2, "num_logprobs": 0},
        {"min_tokens": 3},
    )
    for number in range(0, 40, 4):
        if len(both.story.members) <= 4:
            prompt = random_ids(dice.randint(1, 40), 100 * seed + number)
            if dice.random() < 0.1:
                prompt[0] = 10**6
            forks = (number + 1, number + 2) if dice.random() < 0.2 and len(both.story.members) <= 2 else ()
            kind = {"seed": number, **dice.choice(kinds)}
            both.story.add(number, prompt, dice.randint(1, 9), forks=forks, **kind)
        if both.story.members and dice.random() < 0.2:
            both.story.preempt(dice.choice(both.story.members).sequence_id)
        for _ in range(dice.randint(1, 3)):
            if both.story.members:
                both.story.step()
    both.story.run()
    both.check()
