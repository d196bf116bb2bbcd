"""The runner around a model of three lines: who gets which logits, and who fails when something raises."""

import logging
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from quire_engine.contract.batch import Batch, Fork, ScheduledSequence
from quire_engine.contract.types import MODEL_FAILED, NON_FINITE, SamplingParams, StopParams
from quire_engine.execution.executor import Executor
from quire_engine.execution.runner import Runner

VOCAB = 16
BLOCK = 4
POISON = 13  # the model raises when it sees this token
NAN = 14  # the model's logits for this token are not finite


class NextToken:
    """Predicts the token after the last one; a row depends on nothing else. Remembers what it was given."""

    def __init__(self, raises=None):
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.raises = raises or RuntimeError("boom at 0x7f00, in /secret/path")
        self.forwards = []
        self.logit_rows = []

    def forward(self, step, kv):
        self.forwards.append(step.input_ids.tolist())
        if POISON in step.input_ids:
            raise self.raises
        return step.input_ids[step.sample_rows].unsqueeze(1).float()  # [S, 1]

    def logits(self, hidden):
        self.logit_rows.append(len(hidden))
        ids = hidden[:, 0].long()
        logits = torch.zeros(len(ids), VOCAB)
        logits[torch.arange(len(ids)), (ids + 1) % VOCAB] = 5.0
        logits[ids == NAN] = float("nan")
        return logits

    def greedy(self, hidden, allowed=None):
        return None


class Blocks:
    tensor = torch.zeros(1)

    def __init__(self):
        self.copied = []

    def copy_blocks(self, pairs):
        self.copied.append(tuple(pairs))


def item(sequence_id, tokens, *, prompt=None, start=0, sample=True, score=False, forks=(), **sampling):
    num_prompt = len(tokens) if prompt is None else prompt
    return ScheduledSequence(
        sequence_id=sequence_id,
        choice=0,
        prompt_token_ids=tuple(tokens[:num_prompt]),
        output_token_ids=tuple(tokens[num_prompt:]),
        token_ids=tuple(tokens[start:] if sample else tokens[start:-1]),
        start=start,
        block_ids=tuple(range(8)),
        wants_sample=sample,
        wants_prompt_logprobs=score,
        forks=forks,
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        stop=StopParams(max_new_tokens=8),
    )


def batch(*items, copies=()):
    return Batch(step_id=1, items=items, num_tokens=sum(i.num_tokens for i in items), copies=copies)


def runner(model, kv=None, **limits):
    kv = kv or Blocks()
    return Executor(Runner(model, kv.tensor, BLOCK, torch.device("cpu"), **limits), kv)


def tokens_of(result):
    return {sequence_id: sample.token_id for sequence_id, (sample,) in result.samples.items()}


def test_every_item_and_fork_that_wants_a_sample_gets_one():
    forks = (Fork(sequence_id=7, choice=1), Fork(sequence_id=8, choice=2))
    result = runner(NextToken()).execute(
        batch(
            item(1, [3, 4, 5]),
            item(2, [9, 9, 9, 9], sample=False),
            item(3, [1, 2, 6], start=2, prompt=2),
            item(4, [2, 8], forks=forks),
        )
    )
    assert tokens_of(result) == {1: 6, 3: 7, 4: 9, 7: 9, 8: 9}
    assert (result.prompt_logprobs, result.errors) == ({}, {})


def test_forks_draw_as_the_choices_they_are():
    def draw(choice):
        return item(1, [2, 8], forks=(Fork(sequence_id=2, choice=choice),), temperature=50.0, seed=3)

    model = NextToken()
    tokens = [runner(model).execute(batch(draw(choice))).samples[2][0].token_id for choice in range(12)]
    assert len(set(tokens)) > 4
    assert tokens[0] == runner(model).execute(batch(draw(1))).samples[1][0].token_id


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_logits_are_computed_in_slices_that_change_nothing(rows):
    model = NextToken()
    items = [item(1, [3, 4, 5, 1], score=True, num_prompt_logprobs=2), item(2, [7]), item(3, [8, 9])]
    whole = runner(NextToken()).execute(batch(*items))
    sliced = runner(model, logits_bytes=rows * 4 * VOCAB).execute(batch(*items))
    assert sliced == whole
    assert max(model.logit_rows) <= rows
    assert sum(model.logit_rows) == 6


def test_prompt_logprobs_are_of_the_next_prompt_token():
    tokens = [3, 4, 9, 10]
    result = runner(NextToken()).execute(
        batch(
            item(1, tokens, score=True, num_prompt_logprobs=1),
            item(2, tokens[:3], prompt=4, sample=False, score=True, num_prompt_logprobs=0),
            item(3, [*tokens, 5, 6], prompt=4, start=2, score=True, num_prompt_logprobs=0),
        )
    )
    first = result.prompt_logprobs[1]
    assert [entry.token_id for entry in first] == [4, 9, 10]
    assert [entry.rank for entry in first] == [1, 10, 1]  # 5 is likelier than 9, and eight equals have lower ids
    assert [entry.top_ids for entry in first] == [(4,), (5,), (10,)]
    assert [entry.token_id for entry in result.prompt_logprobs[2]] == [4, 9]
    assert [entry.token_id for entry in result.prompt_logprobs[3]] == [10]
    assert all(entry.top_ids == () for entry in result.prompt_logprobs[2] + result.prompt_logprobs[3])
    assert tokens_of(result) == {1: 11, 3: 7}


def test_only_the_item_that_raises_fails(caplog):
    model, kv = NextToken(), Blocks()
    items = [item(1, [3, 4]), item(2, [5, POISON], forks=(Fork(sequence_id=9, choice=1),)), item(3, [6])]
    with caplog.at_level(logging.ERROR):
        result = runner(model, kv).execute(batch(*items, copies=((1, 2),)))
    assert tokens_of(result) == {1: 5, 3: 7}
    assert set(result.errors) == {2, 9}
    assert kv.copied == [((1, 2),)]  # not again: the target may have been written since
    assert "boom" in caplog.text


def test_what_the_client_is_told_holds_no_address_and_no_path():
    result = runner(NextToken()).execute(batch(item(2, [POISON])))
    assert result.errors == {2: "the model failed on this request (RuntimeError)"}


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: device-side assert"), RuntimeError("CUDA error: lost")]
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_device_is_nobodys_fault(error, count):
    items = [item(1, [POISON]), item(2, [3])][:count]
    with pytest.raises(type(error)):
        runner(NextToken(raises=error)).execute(batch(*items))


@pytest.mark.parametrize("count", [2, 3, 8, 13])
def test_the_culprit_is_found_in_halves_and_is_named_as_the_cause(count):
    for place in range(count):
        model = NextToken()
        items = [item(i, [3 + i % 5], temperature=0.0) for i in range(count)]
        items[place] = item(place, [POISON])
        result = runner(model).execute(batch(*items))
        assert set(result.errors) == {place}
        assert result.errors[place].startswith(MODEL_FAILED)
        assert tokens_of(result) == {i: 4 + i % 5 for i in range(count) if i != place}
        assert len(model.forwards) <= 2 * math.ceil(math.log2(count)) + 1


def test_where_all_fail_none_is_named_as_the_cause():
    result = runner(NextToken()).execute(batch(*(item(i, [POISON]) for i in range(4))))
    assert set(result.errors) == set(range(4))
    assert not any(error.startswith(MODEL_FAILED) for error in result.errors.values())


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("others", [[], [3], [3, 4, 5]])
def test_who_starves_alone_is_not_to_blame(others, error):
    model = NextToken(raises=error)
    starving = item(1, [POISON], forks=(Fork(sequence_id=9, choice=1),))
    result = runner(model).execute(batch(starving, *(item(2 + i, [token]) for i, token in enumerate(others))))
    assert (result.starved, result.errors) == ({1}, {})
    assert tokens_of(result) == {2 + i: token + 1 for i, token in enumerate(others)}


def test_what_a_step_left_behind_is_gone_when_its_items_run_alone():
    class Step:
        pass

    class Crowded(NextToken):
        left: weakref.ref | None = None

        def forward(self, step, kv):
            if self.left is not None:
                assert self.left() is None, "the failed step still holds memory"
            elif len(step.query_lens) > 1:
                held = Step()
                self.left = weakref.ref(held)
                raise torch.OutOfMemoryError
            return super().forward(step, kv)

    model = Crowded()
    result = runner(model).execute(batch(item(1, [3]), item(2, [4])))
    assert tokens_of(result) == {1: 4, 2: 5}
    assert not result.starved
    assert model.left is not None


def test_a_launched_step_is_collected_before_the_next():
    host = runner(NextToken())
    assert host.max_in_flight == 1
    with pytest.raises(RuntimeError, match="no step"):
        host.collect()
    host.launch(batch(item(1, [3])))
    with pytest.raises(RuntimeError, match="collect one first"):
        host.launch(batch(item(1, [4])))
    assert tokens_of(host.collect()) == {1: 4}
    host.launch(batch(item(1, [4])))
    assert tokens_of(host.collect()) == {1: 5}


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**40, 2**70])
def test_a_token_outside_the_vocabulary_never_reaches_the_model(bad):
    model = NextToken()
    result = runner(model).execute(batch(item(1, [3]), item(2, [4, bad]), item(3, [5, bad], sample=False, score=True)))
    assert tokens_of(result) == {1: 4}
    assert set(result.errors) == {2, 3}
    assert model.forwards == [[3]]


def test_non_finite_logits_fail_their_rows_only():
    result = runner(NextToken()).execute(
        batch(item(1, [NAN]), item(2, [3]), item(3, [3, NAN, 5], score=True), item(4, [3, 4], score=True))
    )
    assert result.samples[1][0].error == NON_FINITE
    assert result.samples[2][0].token_id == 4
    assert result.errors == {3: NON_FINITE}
    assert result.non_finite == {1, 3}
    assert set(result.prompt_logprobs) == {4}


def test_a_batch_without_samples_needs_no_logits():
    model = NextToken()
    result = runner(model).execute(batch(item(1, [3, 4, 5], sample=False)))
    assert model.logit_rows == []
    assert result.samples == {}


class NextTokenWithoutLogits(NextToken):
    """Finds maxima without logits, where nothing else is asked."""

    def greedy(self, hidden, allowed=None):
        ids = hidden[:, 0].long()
        return ((ids + 1) % VOCAB).tolist(), (ids != NAN).tolist()


def test_logits_are_not_computed_where_maxima_are_enough():
    model = NextTokenWithoutLogits()
    forks = (Fork(sequence_id=7, choice=1),)
    result = runner(model).execute(batch(item(1, [3, 4, 5]), item(2, [2, 8], forks=forks), item(3, [6, NAN])))
    assert model.logit_rows == []
    assert [result.samples[i][0].token_id for i in (1, 2, 7)] == [6, 9, 9]
    assert result.samples[3][0].error == NON_FINITE
    assert result.non_finite == {3}


@pytest.mark.parametrize(
    "asked", [{"num_logprobs": 0}, {"temperature": 0.5}, {"logit_bias": ((1, 1.0),)}, {"presence_penalty": 0.1}]
)
def test_logits_are_computed_where_one_row_asks_for_more(asked):
    model = NextTokenWithoutLogits()
    runner(model).execute(batch(item(1, [3, 4, 5]), item(2, [2, 8], **asked)))
    assert model.logit_rows == [2]
