"""Mixtures of experts in the reference: the definition in float64, the rule for ties, the independence of rows."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from quire_kernels.kernel_set import Activation, Norm, Routing
from quire_kernels.reference import REFERENCE, experts
from support.experts import expected, packed, random_block

EPS = 1e-5
FLOAT = torch.float32


def _rows(count: int, hidden: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_block_computes_its_definition(activation, biases):
    """Sizes that are no multiples of a panel's, gates beyond the clamp's limit."""
    block = random_block(5, 40, 24, biases=biases, dtype=FLOAT)
    routing, matrices = packed(REFERENCE, block, top_k=2, activation=activation, normalised=False, scale=2.5)
    x, norm = 4 * _rows(19, 40), Norm(torch.full((40,), 5.0), EPS)
    rows = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight
    logits = rows.double() @ block.router.double().T
    if block.router_bias is not None:
        logits += block.router_bias
    weights, index = logits.softmax(-1).topk(2)
    truth = expected(rows, index, 2.5 * weights, block, activation)
    assert (torch.einsum("th,eih->tei", rows, block.gate).abs() > 7).any()
    found = REFERENCE.mix_experts(x, norm, routing, matrices, 1.0, None)
    assert (found - truth).abs().max() < 1e-5 * truth.abs().max()
    residual = _rows(19, 40)
    added = REFERENCE.mix_experts(x, norm, routing, matrices, 0.25, residual.clone())
    assert (added - residual - 0.25 * truth).abs().max() < 1e-5 * truth.abs().max()
    given = REFERENCE.given_experts(rows, index, 2.5 * weights.float(), matrices)
    assert (given - truth).abs().max() < 1e-5 * truth.abs().max()


def test_scores_weights_and_the_choice():
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    some = torch.tensor([[1, 2]])

    def choose(**options: object) -> tuple[torch.Tensor, torch.Tensor]:
        return experts.choose(logits, Routing(weight=None, top_k=2, **options))

    softmax, sigmoid = logits.softmax(-1), torch.sigmoid(logits)
    for scoring, scores in (("softmax", softmax), ("sigmoid", sigmoid)):
        index, weights = choose(scoring=scoring, normalised=False, scale=3.0)
        assert torch.equal(index, some)
        assert torch.allclose(weights, 3 * scores[:, [1, 2]])
        _, weights = choose(scoring=scoring)
        assert torch.allclose(weights, scores[:, [1, 2]] / scores[:, [1, 2]].sum())
    # The softmax of the chosen logits alone is the normalised one of all.
    assert torch.allclose(choose()[1], logits[:, [1, 2]].softmax(-1))
    # A bias decides, and weighs nothing.
    index, weights = choose(scoring="sigmoid", normalised=False, selection_bias=torch.tensor([0.0, 0.0, -1.0, 5.0]))
    assert torch.equal(index, torch.tensor([[3, 1]]))
    assert torch.allclose(weights, sigmoid[:, [3, 1]])


def test_of_equal_logits_the_lower_index_is_chosen():
    logits = torch.zeros(3, 70)
    logits[1, 69] = 1.0
    logits[2, 1::2] = 1.0
    index, _ = experts.choose(logits, Routing(weight=None, top_k=4))
    assert index.tolist() == [[0, 1, 2, 3], [69, 0, 1, 2], [1, 3, 5, 7]]


def test_an_index_that_is_no_experts_adds_nothing():
    block = random_block(3, 40, 24, dtype=FLOAT)
    _, matrices = packed(REFERENCE, block, top_k=2)
    rows, index = _rows(2, 40), torch.tensor([[1, 3], [3, 3]])
    found = REFERENCE.given_experts(rows, index, torch.ones(2, 2), matrices)
    truth = expected(rows[:1], index[:1, :1], torch.ones(1, 1), block)
    assert (found[:1] - truth).abs().max() < 1e-5 * truth.abs().max()
    assert not found[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_does_not_depend_on_the_others(dtype):
    block = random_block(6, 96, 136, biases=True, dtype=dtype)
    routing, matrices = packed(REFERENCE, block, top_k=3)
    x, residual, norm = _rows(70, 96, dtype), _rows(70, 96, dtype).flip(0), Norm(torch.ones(96, dtype=dtype), EPS)
    whole = REFERENCE.mix_experts(x, norm, routing, matrices, 1.0, residual.clone())
    assert whole.dtype is dtype
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    for count in (0, 1, 2, 15, 16, 17, 33, 70):
        chosen = order[:count]
        found = REFERENCE.mix_experts(x[chosen], norm, routing, matrices, 1.0, residual[chosen])
        assert torch.equal(found, whole[chosen]), f"{count} rows"
    broken = x.clone()
    broken[3] = torch.nan
    found = REFERENCE.mix_experts(broken, norm, routing, matrices, 1.0, residual.clone())
    assert not found[3].isfinite().any()
    kept = [row for row in range(70) if row != 3]
    assert torch.equal(found[kept], whole[kept])
