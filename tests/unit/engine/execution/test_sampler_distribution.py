"""The sampled distribution: exact probabilities, observed frequencies, and the processors of transformers."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution import distribution
from quire_engine.execution.logit_rules import SampleRow, apply_rules
from support.covering import few
from support.sampling import sample

DRAWS = 20_000
# Upper 0.1 % points of chi-square by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 7: 24.32, 11: 31.26}
LOGITS = torch.tensor([1.5, 0.2, -0.7, 2.0, 0.0, -2.0, 1.1, 0.2, -1.0, 0.9, -0.3, 1.7])


def frequencies(logits, seed=0, **sampling):
    rows = [
        SampleRow(
            sampling=SamplingParams(seed=seed + i, **sampling),
            stop=StopParams(max_new_tokens=1),
            choice=0,
            prompt_token_ids=(1, 2),
            output_token_ids=(),
            position=2,
            logits_row=0,
        )
        for i in range(DRAWS)
    ]
    tokens = [sampled.token_id for sampled in sample(logits.unsqueeze(0), rows)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)).double()


def assert_fits(counts, probabilities):
    """Chi-square at p = 0.001 over the possible tokens; impossible ones never drawn. Seeds are fixed."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * DRAWS
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    assert statistic < CRITICAL[int(possible.sum()) - 1]


def kept(scores):
    return torch.softmax(scores.double(), dim=-1)


@pytest.mark.parametrize("temperature", few([0.5, 1.0, 2.0], 2.0))
def test_temperature(temperature):
    assert_fits(frequencies(LOGITS, temperature=temperature), kept(LOGITS / temperature))


@pytest.mark.matrix  # one after another below, and each by its tokens
def test_top_k():
    counts = frequencies(LOGITS, seed=10**6, top_k=5, temperature=1.3)
    assert_fits(counts, kept(TopKLogitsWarper(5)(None, (LOGITS / 1.3).unsqueeze(0))[0]))


@pytest.mark.matrix
def test_top_p():
    counts = frequencies(LOGITS, seed=2 * 10**6, top_p=0.8)
    assert_fits(counts, kept(TopPLogitsWarper(0.8)(None, LOGITS.unsqueeze(0))[0]))


@pytest.mark.matrix
def test_min_p():
    counts = frequencies(LOGITS, seed=3 * 10**6, min_p=0.4)
    assert_fits(counts, kept(MinPLogitsWarper(0.4)(None, LOGITS.unsqueeze(0))[0]))


def test_top_k_then_top_p_then_min_p():
    scores = TopKLogitsWarper(9)(None, LOGITS.unsqueeze(0))
    scores = TopPLogitsWarper(0.9)(None, scores)
    scores = MinPLogitsWarper(0.3)(None, scores)[0]
    assert_fits(frequencies(LOGITS, seed=4 * 10**6, top_k=9, top_p=0.9, min_p=0.3), kept(scores))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_truncation_keeps_the_tokens_transformers_keeps(seed, vocab_size):
    """Without ties the sets are equal. The flat distributions over 5000 tokens need more than the selected prefix."""
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(seed)) * (4 if seed % 2 else 0.1)
    probabilities = torch.softmax(logits, dim=1)
    for k in (1, 7, 49):
        assert torch.equal(distribution.keep_top_k(logits, [k] * 4), TopKLogitsWarper(k)(None, logits).isfinite())
    for p in (0.1, 0.5, 0.77, 0.95):
        assert torch.equal(
            distribution.keep_top_p(probabilities, [p] * 4), TopPLogitsWarper(p)(None, logits).isfinite()
        )
    for p in (0.01, 0.3):
        assert torch.equal(
            distribution.keep_min_p(probabilities, [p] * 4), MinPLogitsWarper(p)(None, logits).isfinite()
        )


def test_each_row_has_its_own_truncation():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 3)
    assert distribution.keep_top_k(logits, [1, 4, 2]).sum(dim=1).tolist() == [1, 4, 2]
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 5)
    sizes = distribution.keep_top_p(probabilities, [0.0, 0.5, 0.51, 0.75, 0.999]).sum(dim=1).tolist()
    assert sizes == [1, 1, 2, 2, 4]


def test_ties_are_cut_by_id():
    values = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert distribution.keep_top_k(values, [2]).tolist() == [[False, True, True, False, False]]
    assert distribution.keep_top_p(torch.full((1, 4), 0.25), [0.5]).tolist() == [[True, True, False, False]]


def test_keys_order_floats_and_break_ties_by_id():
    values = torch.tensor([[0.0, -0.0, -1.0, 1e-45, -torch.inf, 3e38, -1e-45]])
    keys = distribution.order_keys(values)
    order = distribution.key_ids(keys.sort(dim=1, descending=True).values, 7)
    assert order.tolist() == [[5, 3, 0, 1, 6, 2, 4]]


def test_the_draw_inverts_the_cumulative_distribution_exactly():
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    below_one = 1.0 - 2.0**-53
    for uniform, expected in [(0.0, 1), (0.25 - 2.0**-53, 1), (0.25, 3), (0.75, 4), (below_one, 4)]:
        ids, possible = distribution.draw(probabilities, [uniform])
        assert (ids.tolist(), possible.tolist()) == ([expected], [True])


def test_nothing_to_draw_is_reported():
    ids, possible = distribution.draw(torch.tensor([[0.0, 0.0], [0.0, 1.0], [torch.nan, torch.nan]]), [0.5, 0.5, 0.5])
    assert possible.tolist() == [False, True, False]
    assert ids[1] == 1


def penalised(logits, *, prompt, output, **sampling):
    row = SampleRow(
        sampling=SamplingParams(**sampling),
        stop=StopParams(max_new_tokens=1),
        choice=0,
        prompt_token_ids=prompt,
        output_token_ids=output,
        position=len(prompt) + len(output),
        logits_row=0,
    )
    changed = logits.clone().unsqueeze(0)
    apply_rules(changed, [row])
    return changed[0]


@pytest.mark.parametrize("penalty", [0.7, 1.5])
def test_the_repetition_penalty_equals_that_of_transformers(penalty):
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1)) * 3
    ours = penalised(logits, prompt=[5, 9, 5, 11], output=[20, 9], repetition_penalty=penalty)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[5, 9, 5, 11, 20, 9]]), logits.unsqueeze(0))[0]
    assert torch.equal(ours, theirs)


def test_presence_and_frequency_penalties_count_the_output_only():
    logits = torch.linspace(-2, 2, 50)
    ours = penalised(logits, prompt=[1, 2, 3], output=[3, 4, 4, 4, 30], presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.clone()
    for token, count in {3: 1, 4: 3, 30: 1}.items():
        expected[token] = logits[token] - (0.5 + 0.25 * count)
    assert torch.equal(ours, expected)


def test_rules_apply_in_their_order():
    """Repetition first (on the raw logit), then presence, then the bias; masks survive all of them."""
    logits = torch.tensor([4.0, 4.0, -4.0, 1.0])
    ours = penalised(
        logits,
        prompt=[0],
        output=[2, 1],
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias=((0, 0.5), (2, 0.5), (3, 100.0)),
        banned_token_ids=(3, 3),
    )
    assert ours.tolist() == [2.5, 1.0, -8.5, -torch.inf]
