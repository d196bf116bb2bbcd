"""What the sampler chooses and reports, row by row, and that rows never touch each other."""

import random

import pytest
import torch

from quire_engine.contract.types import NO_CANDIDATE, NON_FINITE, SamplingParams, StopParams, ThinkingParams
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.logit_rules import SampleRow
from support.sampling import sample, score

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def sample_row(logits_row=0, *, prompt=(1, 2, 3), output=(), choice=0, stop_ids=(), **sampling):
    return SampleRow(
        sampling=SamplingParams(**sampling),
        stop=StopParams(max_new_tokens=16, stop_token_ids=stop_ids),
        choice=choice,
        prompt_token_ids=prompt,
        output_token_ids=output,
        position=len(prompt) + len(output),
        logits_row=logits_row,
    )


def one(logits, **kwargs):
    (result,) = sample(torch.tensor([logits], dtype=torch.float32), [sample_row(**kwargs)])
    return result


def mixed_rows(count, vocab_size, seed):
    """Rows of every kind: each feature alone and several together."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        ids = [rng.randrange(vocab_size) for _ in range(40)]
        params = {
            "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.9, 1e-9]),
            "seed": rng.randrange(-(2**63), 2**63),
            "top_k": rng.choice([0, 0, 1, 7, 300, 10**6]),
            "top_p": rng.choice([1.0, 1.0, 0.3, 0.95]),
            "min_p": rng.choice([0.0, 0.0, 0.05]),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 0.8]),
            "presence_penalty": rng.choice([0.0, 0.0, 0.9]),
            "frequency_penalty": rng.choice([0.0, 0.0, -0.4]),
            "logit_bias": rng.choice([(), ((3, 5.0), (ids[0], -100.0))]),
            "allowed_token_ids": rng.choice([(), (), (), tuple(ids[:9])]),
            "banned_token_ids": rng.choice([(), (ids[1], ids[2])]),
            "banned_sequences": rng.choice([(), ((ids[-2], ids[-1], ids[4]), (ids[-1], ids[5]), (ids[-1], ids[6]))]),
            "logprob_token_ids": rng.choice([(), (), tuple(ids[:3]), tuple(ids[:11])]),
            "min_tokens": rng.choice([0, 30]),
            "num_logprobs": rng.choice([None, None, 0, 1, 5, 20]),
        }
        rows.append(sample_row(i, prompt=ids[:20], output=ids[20:], stop_ids=(0, ids[3]), choice=i % 3, **params))
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [61, 257, 1024, 5003, 32001])
def test_a_row_is_bitwise_the_same_alone_and_among_others(vocab_size, device):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(32, vocab_size, generator=generator) * 4).to(device)
    rows = mixed_rows(32, vocab_size, seed=vocab_size)
    together = sample(logits, rows)
    assert all(result.error is None for result in together)
    order = random.Random(1).sample(range(32), 32)
    shuffled = sample(logits, [rows[i] for i in order])
    sliced = sample(logits, rows, slice_bytes=5 * 4 * vocab_size)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1].clone(), [sample_row_at(row, 0)])
        assert alone == [together[i]] == [sliced[i]] == [shuffled[order.index(i)]]


def sample_row_at(row, logits_row):
    return SampleRow(
        sampling=row.sampling,
        stop=row.stop,
        choice=row.choice,
        prompt_token_ids=row.prompt_token_ids,
        output_token_ids=row.output_token_ids,
        position=row.position,
        logits_row=logits_row,
    )


def test_results_do_not_depend_on_the_number_of_threads():
    logits = torch.randn(16, 20_011, generator=torch.Generator().manual_seed(3)) * 3
    rows = mixed_rows(16, 20_011, seed=3)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(sample(logits, rows))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_the_logits_are_left_as_they_were():
    logits = torch.randn(32, 300, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sample(logits, mixed_rows(32, 300, seed=0))
    assert torch.equal(logits, before)


def test_no_rows_give_no_samples():
    assert sample(torch.zeros(2, 8), []) == []


def test_greedy_takes_the_lowest_id_of_equal_maxima():
    assert one([0.0, 2.0, 2.0, 2.0], temperature=0.0).token_id == 1
    assert one([0.0, 2.0, 2.0, 2.0], temperature=0.0, banned_token_ids=(1,)).token_id == 2


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-9])
def test_a_vanishing_temperature_is_greedy(temperature):
    assert one([0.0, 3.0, 2.9, 3.0], temperature=temperature).token_id == 1


def test_huge_logits_at_a_low_temperature_stay_finite():
    for seed in range(20):
        assert one([3e38, -3e38, 3e38, 1.0], temperature=1e-4, seed=seed).token_id in (0, 2)


def test_forks_sample_their_own_tokens_from_one_row():
    logits = torch.zeros(2, 1000)
    rows = [sample_row(1, choice=choice, seed=5) for choice in range(4)]
    tokens = [result.token_id for result in sample(logits, rows)]
    assert len(set(tokens)) == 4
    assert tokens == [sample(logits, [row])[0].token_id for row in rows]


def test_the_draw_depends_on_seed_choice_and_position_only():
    logits = torch.zeros(1, 4096)
    first = sample_row(prompt=(1, 2, 3), output=(4,), seed=9)
    again = sample_row(prompt=(5, 6, 7, 8), seed=9)  # other tokens, a different split, the same position
    later = sample_row(prompt=(1, 2, 3), output=(4, 5), seed=9)
    other = sample_row(prompt=(1, 2, 3), output=(4,), seed=-9)
    tokens = [result.token_id for result in sample(logits, [first, again, later, other])]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_non_finite_row_fails_alone(value, temperature, device):
    logits = torch.randn(5, 130, generator=torch.Generator().manual_seed(1)).to(device)
    rows = [sample_row(i, temperature=temperature, top_p=0.9, num_logprobs=3, seed=i) for i in range(5)]
    expected = sample(logits, rows)
    logits[2, 77] = value
    results = sample(logits, rows)
    assert results[2].error == NON_FINITE
    assert results[2].token_id == -1
    assert [results[i] for i in (0, 1, 3, 4)] == [expected[i] for i in (0, 1, 3, 4)]


@pytest.mark.parametrize(
    "bad",
    [
        {"logit_bias": ((-1, 100.0),)},
        {"logit_bias": ((64, 100.0),)},
        {"allowed_token_ids": (3, 2**40)},
        {"banned_token_ids": (-64,)},
        {"banned_sequences": ((1, 2), (1, 64))},
        {"logprob_token_ids": (64,), "num_logprobs": 0},
        {"repetition_penalty": 1.2, "prompt": (1, 64)},
        {"presence_penalty": 0.5, "output": (1, -2)},
        {"frequency_penalty": 0.5, "output": (99,)},
    ],
)
def test_an_id_outside_the_vocabulary_fails_its_row_and_no_other(bad):
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    rows = [sample_row(i, temperature=0.9, seed=i, logit_bias=((5, 1.0),), num_logprobs=2) for i in range(3)]
    expected = sample(logits, rows)
    results = sample(logits, [rows[0], sample_row(1, **bad), rows[2]])
    assert "outside the model's vocabulary of 64" in results[1].error
    assert [results[0], results[2]] == [expected[0], expected[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_masked_is_an_error(temperature):
    masked = one([1.0, 2.0, 3.0], temperature=temperature, allowed_token_ids=(1,), banned_token_ids=(1,))
    assert masked.error == NO_CANDIDATE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_masked_until_min_tokens(temperature):
    logits = [0.0, 50.0, 0.0, 0.0]
    common = {"temperature": temperature, "stop_ids": (1, 9999), "min_tokens": 3}
    assert one(logits, output=(2, 2), **common).token_id != 1
    assert one(logits, output=(2, 2, 2), **common).token_id == 1
    assert one(logits, temperature=temperature, stop_ids=(1,)).token_id == 1


def test_allowed_ids_are_the_only_ones_drawn():
    tokens = {one([9.0, 0.0, 0.0, 0.0, 9.0], allowed_token_ids=(1, 3), seed=seed).token_id for seed in range(60)}
    assert tokens == {1, 3}


def test_logprobs_come_from_the_raw_logits():
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(8)) * 2
    row = sample_row(temperature=0.5, top_k=3, logit_bias=((123, 100.0),), num_logprobs=20, seed=1)
    (result,) = sample(logits, [row])
    exact = torch.log_softmax(logits.double(), dim=1)[0]
    order = sorted(range(500), key=lambda token: (-logits[0, token].item(), token))
    assert result.token_id == result.logprobs.token_id == 123
    assert result.logprobs.logprob == pytest.approx(exact[123].item(), abs=1e-5)
    assert result.logprobs.rank == order.index(123) + 1
    assert list(result.logprobs.top_ids) == order[:20]
    assert result.logprobs.top_logprobs == pytest.approx([exact[token].item() for token in order[:20]], abs=1e-5)


def test_ties_in_the_top_logprobs_go_by_id():
    result = one([1.0, 3.0, 0.0, 3.0, -0.0, 1.0], temperature=0.0, num_logprobs=20)
    assert result.logprobs.top_ids == (1, 3, 0, 5, 2, 4)  # the whole vocabulary, the two zeros equal
    assert result.logprobs.rank == 1
    assert one([1.0, 3.0, 3.0], temperature=0.0, num_logprobs=0, banned_token_ids=(1,)).logprobs.rank == 2


@pytest.mark.parametrize(
    ("output", "masked"),
    [
        ((), False),
        ((5,), False),
        ((5, 6), True),
        ((6,), False),  # the prompt's end is not a part of what was said
        ((9, 5, 6), True),
        ((5, 6, 9), False),
        ((5, 9, 6), False),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_banned_sequence_is_not_completed(output, masked, temperature):
    row = {"prompt": (1, 5), "output": output, "banned_sequences": ((5, 6, 2), (7, 1)), "temperature": temperature}
    assert one([0.0, 8.0, 50.0, 7.0], **row).token_id == (1 if masked else 2)
    assert one([0.0, 50.0, 8.0, 7.0], **{**row, "output": (7,)}).token_id == 2


def test_the_log_probabilities_of_certain_ids():
    logits = [1.0, 3.0, 3.0, -2.0, 0.5]
    whole = one(logits, temperature=0.0, num_logprobs=5).logprobs
    by_id = dict(zip(whole.top_ids, whole.top_logprobs, strict=True))
    told = one(logits, temperature=0.0, num_logprobs=2, logprob_token_ids=(3, 1, 0)).logprobs
    assert (told.top_ids, told.asked_ids) == ((1, 2), (3, 1, 0))
    assert told.asked_logprobs == (by_id[3], by_id[1], by_id[0])
    alone = one(logits, temperature=0.0, num_logprobs=0, logprob_token_ids=(3, 1, 0)).logprobs
    assert (alone.top_ids, alone.asked_logprobs) == ((), told.asked_logprobs)
    assert one(logits, temperature=0.0, logprob_token_ids=(3,)).logprobs is None


def test_num_logprobs_zero_reports_the_chosen_token_only():
    result = one([1.0, 3.0, 0.0], temperature=0.0, num_logprobs=0)
    assert (result.logprobs.top_ids, result.logprobs.top_logprobs) == ((), ())
    assert result.logprobs.logprob == pytest.approx(-0.16984606, abs=1e-6)
    assert one([1.0, 3.0, 0.0], temperature=0.0).logprobs is None


@pytest.mark.parametrize("device", DEVICES)
def test_scores_equal_the_logprobs_of_the_same_rows_sampled(device):
    logits = (torch.randn(9, 777, generator=torch.Generator().manual_seed(4)) * 3).to(device)
    rows = [sample_row(i, temperature=1.0, seed=i, num_logprobs=4) for i in range(9)]
    sampled = sample(logits, rows)
    scores = score(logits, [result.token_id for result in sampled], 4, slice_bytes=2 * 4 * 777)
    assert scores == [result.logprobs for result in sampled]


def test_a_non_finite_row_is_not_scored():
    logits = torch.zeros(3, 10)
    logits[1, 4] = float("nan")
    scores = score(logits, [0, 0, 0], 2)
    assert scores[1] is None
    assert scores[0] == scores[2]
    assert scores[0].top_ids == (0, 1)


def test_what_must_follow_is_left_to_a_step_where_sequences_are_banned():
    thinking = ThinkingParams(end_ids=(7, 8, 9), is_open=True, max_tokens=1)
    for banned, tokens in [((), [7, 8, 9]), (((8, 9),), [7])]:
        row = sample_row(output=(5,), thinking=thinking, banned_sequences=banned)
        assert [7, *Constraints(None).forced(row, 7)] == tokens
