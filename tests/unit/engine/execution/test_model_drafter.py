"""Drafts by a model: what it would say next after any history of calls, a small pool, rejected drafts and faults."""

from __future__ import annotations

import json
import logging
import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

import pytest

from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.drafts import NO_DRAFT, Draft, Wish
from quire_engine.contract.errors import ConfigError
from quire_engine.execution.drafting.model import ModelDrafter, check_same_tokens
from quire_engine.execution.runner import Computed, Runner
from support.fake_model import VOCAB_SIZE, extend, sample

BLOCK = 4


class Pretending:
    """Each slot has the hash of the tokens up to its own; what a sequence says next is a hash of all its slots."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.sizes: list[int] = []  # tokens of each step
        self.failing: set[int] = set()  # sequences whose rows are not finite
        self.raises = False

    def work(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self, batch: Batch) -> Computed:
        if self.raises:
            raise RuntimeError("planted")
        self.sizes.append(batch.num_tokens)
        result = StepResult()
        for item in batch.items:
            before = item.start - 1
            chain = self.slots[item.block_ids[before // BLOCK], before % BLOCK] if item.start else 0
            for position, token in enumerate(item.token_ids, item.start):
                chain = extend(chain, token)
                self.slots[item.block_ids[position // BLOCK], position % BLOCK] = chain
            if item.wants_sample:
                error = "not finite" if item.sequence_id in self.failing else None
                result.samples[item.sequence_id] = (SampledToken(token_id=sample(chain, 0), error=error),)
        return Computed(result)


def made(num_blocks: int = 1000, max_model_len: int = 1000) -> tuple[Pretending, ModelDrafter]:
    runner = Pretending()
    drafter = ModelDrafter(cast(Runner, runner), num_blocks=num_blocks, block_size=BLOCK, max_model_len=max_model_len)
    return runner, drafter


def told(token_ids: list[int], most: int) -> Draft:
    """What the model says behind these tokens."""
    chain, found = 0, []
    for token in token_ids:
        chain = extend(chain, token)
    for _ in range(most):
        found.append(sample(chain, 0))
        chain = extend(chain, found[-1])
    return Draft(tuple(found))


@pytest.mark.parametrize("num_blocks", [400, 45, 12])
def test_drafts_are_what_the_model_says_whatever_was_accepted(num_blocks: int) -> None:
    """Random numbers of drafts are right, sequences come, go, change and wait; a draft is right or there is none."""
    dice, (_, drafter) = random.Random(num_blocks), made(num_blocks)
    known: dict[int, list[int]] = {}
    num_right = num_none = 0
    for step in range(600):
        if len(known) < 5:
            known[step] = [dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 30))]
        asked = [sequence_id for sequence_id in known if dice.random() < 0.8]
        wishes = [Wish(sequence_id, known[sequence_id], dice.randint(1, 5)) for sequence_id in asked]
        for wish, draft in zip(wishes, drafter.draft(wishes), strict=True):
            assert draft in (NO_DRAFT, told(known[wish.sequence_id], wish.most))
            num_right, num_none = num_right + (draft != NO_DRAFT), num_none + (draft == NO_DRAFT)
            count = dice.randint(0, len(draft.token_ids))
            known[wish.sequence_id] += [*draft.token_ids[:count], dice.randrange(VOCAB_SIZE)]
        for sequence_id in list(known):
            if len(known[sequence_id]) > 60 or dice.random() < 0.01:
                del known[sequence_id]
                drafter.forget(sequence_id)
            elif dice.random() < 0.01:
                known[sequence_id] = [dice.randrange(VOCAB_SIZE) for _ in range(10)]
    assert num_right > (1000 if num_blocks == 400 else 200)
    assert (num_none > 0) == (num_blocks < 400)
    for sequence_id in known:
        drafter.forget(sequence_id)
    assert sorted(drafter._free) == list(range(num_blocks)), "each block came back once"


def test_a_long_sequence_is_computed_in_parts_and_the_others_guess_meanwhile() -> None:
    runner, drafter = made()
    long, short = [7] * 300, [5] * 10
    while drafter.draft([Wish(1, long, 3), Wish(2, short, 3)]) != [told(long, 3), told(short, 3)]:
        short.append(6)
        assert len(runner.sizes) < 30
    assert max(runner.sizes) <= 64
    assert sum(runner.sizes) < 400, "each token is computed once"


def test_new_tokens_alone_are_computed() -> None:
    runner, drafter = made()
    token_ids = list(range(20))
    (draft,) = drafter.draft([Wish(1, token_ids, 4)])
    token_ids += [*draft.token_ids, 1]  # all right
    runner.sizes.clear()
    (draft,) = drafter.draft([Wish(1, token_ids, 4)])
    assert runner.sizes == [2, 1, 1, 1], "the last guess was never computed"
    token_ids += [draft.token_ids[0], draft.token_ids[1] + 1]
    runner.sizes.clear()
    drafter.draft([Wish(1, token_ids, 2)])
    assert runner.sizes == [1, 1]


def test_the_same_calls_give_the_same_guesses() -> None:
    runs = []
    for _ in range(2):
        dice, (_, drafter) = random.Random(4), made(20)
        runs.append(
            [
                drafter.draft([Wish(i, [i] * dice.randint(1, 30), 2) for i in dice.sample(range(9), 4)])
                for _ in range(60)
            ]
        )
    assert runs[0] == runs[1]


def test_the_sequence_that_was_asked_for_longest_ago_gives_its_blocks() -> None:
    runner, drafter = made(6)
    for sequence_id in (1, 2, 1, 3):  # two blocks each
        drafter.draft([Wish(sequence_id, [sequence_id] * 8, 1)])
    drafter.draft([Wish(4, [4] * 8, 1)])
    runner.sizes.clear()
    drafter.draft([Wish(1, [1] * 9, 1)])
    drafter.draft([Wish(2, [2] * 9, 1)])
    assert runner.sizes == [1, 9]


def test_a_sequence_longer_than_the_model_or_the_pool_has_no_drafts() -> None:
    _, drafter = made(max_model_len=20)
    assert drafter.draft([Wish(1, [1] * 19, 5)]) == [told([1] * 19, 2)]
    assert drafter.draft([Wish(1, [1] * 20, 5)]) == [told([1] * 20, 1)]
    assert drafter.draft([Wish(1, [1] * 21, 5)]) == [NO_DRAFT]
    _, drafter = made(2)
    assert drafter.draft([Wish(1, [1] * 9, 1), Wish(2, [2] * 4, 1)]) == [NO_DRAFT, told([2] * 4, 1)]


def test_a_fault_costs_the_drafts_of_the_sequences_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    runner, drafter = made()
    runner.failing = {1}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert drafter.draft([Wish(1, [1], 2), Wish(2, [2], 2)]) == [NO_DRAFT, told([2], 2)]
        runner.raises = True
        assert drafter.draft([Wish(2, [2], 2)]) == [NO_DRAFT]
        runner.raises = False
        assert drafter.draft([Wish(2, [2], 2), Wish(3, [3], 2)]) == [NO_DRAFT, told([3], 2)]
    assert [record.getMessage() for record in caplog.records] == [
        "the draft model failed, and requests where it does go on without guesses: not finite"
    ]
    for sequence_id in (1, 2, 3):
        drafter.forget(sequence_id)
    assert (len(drafter._free), drafter._held, drafter._failed) == (1000, {}, set())


def test_a_prediction_goes_first_and_the_model_goes_on_where_it_ends() -> None:
    runner, drafter = made()
    token_ids = [1, 2, 3, 50, 51]
    assert drafter.draft([Wish(1, token_ids, 2, (50, 51, 52, 53))]) == [Draft((52, 53), 2, is_predicted=True)]
    assert runner.sizes == []
    token_ids += [52, 99]
    assert drafter.draft([Wish(1, token_ids, 2, (50, 51, 52, 53))]) == [told(token_ids, 2)]


def write(folder: Path, vocab: object, added: list[dict[str, object]]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    return folder


def test_tokens_must_be_the_same(tmp_path: Path) -> None:
    end = {"id": 2, "content": "<end>"}
    ours = write(tmp_path / "ours", {"a": 0, "b": 1}, [end])
    check_same_tokens(ours, write(tmp_path / "same", {"b": 1, "a": 0}, [end]), (3, 8))
    check_same_tokens(ours, write(tmp_path / "pieces", [["a", -1.0], ["b", -2.0]], [end]), (3, 3))
    with pytest.raises(ConfigError, match="'a' is 1 there and 0 in the model's"):
        check_same_tokens(ours, write(tmp_path / "other", {"b": 0, "a": 1}, [end]), (3, 3))
    with pytest.raises(ConfigError, match="'<end>' is no token there and 2 in the model's"):
        check_same_tokens(ours, write(tmp_path / "fewer", {"a": 0, "b": 1}, []), (3, 3))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        check_same_tokens(ours, tmp_path, (3, 3))
    check_same_tokens(tmp_path, tmp_path, (3, 3))
    with pytest.raises(ConfigError, match="it has 4 tokens and the model 3"):
        check_same_tokens(tmp_path, tmp_path, (3, 4))
