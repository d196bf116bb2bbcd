"""Mixtures of experts in the reference: the definition in float64, the rule for ties, the independence of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from quire_kernels.activations import Activation
from quire_kernels.kernel_set import Norm, Routing
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


def _deepseek(logits: torch.Tensor, bias: torch.Tensor, groups: int, kept: int, top_k: int) -> torch.Tensor:
    """The experts [T, E] and their weights, as DeepSeek-V3's own code finds them: every other one weighs nothing."""
    scores = logits.sigmoid()
    choice = (scores + bias).view(len(logits), groups, -1)
    best = choice.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    mask = torch.zeros(len(logits), groups).scatter(1, best, 1.0).bool()
    chosen = choice.masked_fill(~mask[..., None], -torch.inf).flatten(1).topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    weights = 2.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(logits).scatter(1, chosen, weights)


def test_groups_are_kept_by_their_two_best_experts():
    random = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(200, 24, generator=random), 0.3 * torch.randn(24, generator=random)
    routing = Routing(
        weight=None,
        top_k=5,
        scoring="sigmoid",
        selection_bias=bias,
        groups=6,
        kept_groups=2,
        epsilon=1e-20,
        scale=2.5,
    )
    index, weights = experts.choose(logits, routing)
    found = torch.zeros_like(logits).scatter(1, index, weights)
    wanted = _deepseek(logits, bias, 6, 2, 5)
    assert torch.equal(found > 0, wanted > 0)
    assert torch.allclose(found, wanted)
    single, _ = experts.choose(logits, replace(routing, best_of_group=1, selection_bias=None))
    grouped = logits.view(200, 6, 4)
    best = grouped.amax(-1).topk(2, dim=-1).indices
    assert all(set((row // 4).tolist()) <= set(kept.tolist()) for row, kept in zip(single, best, strict=True))
    everywhere, _ = experts.choose(logits, replace(routing, groups=1, kept_groups=1))
    assert not torch.equal(everywhere.sort().values, index.sort().values)


def test_of_equal_groups_the_lower_is_kept():
    routing = Routing(weight=None, top_k=3, scoring="sigmoid", groups=3, kept_groups=2)
    index, _ = experts.choose(torch.zeros(1, 6), routing)
    assert index.tolist() == [[0, 1, 2]]
    logits = torch.zeros(1, 6)
    logits[0, 5] = 1.0
    assert experts.choose(logits, routing)[0].tolist() == [[5, 0, 1]]


def test_sums_are_bounded_and_experts_are_scaled():
    logits = torch.tensor([[0.0, -1.0, 0.0, -3.0]])
    scores = logits.softmax(-1)
    total = scores[0, 0] + scores[0, 2]
    index, weights = experts.choose(logits, Routing(weight=None, top_k=2, least_sum=2.0, scale=3.0))
    assert index.tolist() == [[0, 2]]
    assert torch.allclose(weights, 3 * scores[:, [0, 2]] / 2.0)
    _, weights = experts.choose(logits, Routing(weight=None, top_k=2, least_sum=0.1, epsilon=0.5))
    assert torch.allclose(weights, scores[:, [0, 2]] / (total + 0.5))
    scales = torch.tensor([1.0, 2.0, -3.0, 4.0])
    _, weights = experts.choose(logits, Routing(weight=None, top_k=2, expert_scales=scales))
    assert torch.allclose(weights, scores[:, [0, 2]] / total * torch.tensor([1.0, -3.0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 5}, "1 of 5 groups of 12 experts cannot be kept"),
        ({"groups": 3, "kept_groups": 4}, "4 of 3 groups of 12 experts cannot be kept"),
        ({"groups": 12, "kept_groups": 12}, "the best 2 of a group of 1 experts"),
        ({"groups": 6, "kept_groups": 1}, "4 experts are not in 1 groups of 2"),
        ({"expert_scales": torch.ones(11)}, r"the experts' scales must be contiguous float32 \[12\]"),
    ],
)
def test_a_routing_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Routing(weight=None, top_k=4, **options).check(12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_multiplies_rows(dtype):
    """By its definition, and each row whatever rows there are beside it."""
    x, wide, weight = _rows(70, 96, dtype), _rows(70, 40, dtype).flip(0), _rows(1, 96, dtype) / 10
    norm, gate = Norm(torch.full((96,), 1.5, dtype=dtype), EPS), REFERENCE.pack_router(weight, None)
    normed = REFERENCE.norm_linear(x, norm, REFERENCE.pack_linear(torch.eye(96, dtype=dtype), None))
    found = REFERENCE.gate_rows(x, norm, gate, wide.clone())
    truth = wide.double() * torch.sigmoid(normed.double() @ weight.double().T)
    assert (found - truth).abs().max() < (2.0**-8 if dtype is torch.bfloat16 else 1e-6) * truth.abs().max()
    for count in (0, 1, 15, 33):
        assert torch.equal(REFERENCE.gate_rows(x[:count], norm, gate, wide[:count].clone()), found[:count])


def test_a_router_may_norm_its_own_rows():
    block = random_block(5, 40, 24, dtype=FLOAT)
    own = Norm(torch.linspace(0.1, 0.3, 40), EPS)
    routing, matrices = packed(REFERENCE, block, top_k=2, norm=own)
    x, norm = _rows(19, 40), Norm(torch.full((40,), 2.0), EPS)
    normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    weights, index = ((normed * own.weight).double() @ block.router.double().T).softmax(-1).topk(2)
    truth = expected(normed * norm.weight, index, weights / weights.sum(-1, keepdim=True), block)
    found = REFERENCE.mix_experts(x, norm, routing, matrices, 1.0, None)
    assert (found - truth).abs().max() < 1e-5 * truth.abs().max()


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
