"""Mixtures of experts in C++, on every instruction set of this CPU: the definition, and rows bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from quire_kernels.activations import Activation
from quire_kernels.cpu.stored import STACKED
from quire_kernels.cpu.variants import usable_variants
from quire_kernels.kernel_set import ExpertMatrices, Norm, Routing, expert_rows
from quire_kernels.reference.experts import choose
from quire_kernels.stored import joined
from support.cpu_linear import EPS, KINDS, kernel_set
from support.cpu_stored import stored_matrix
from support.experts import expected, packed, random_block

BF16 = torch.bfloat16
MOST_ROWS = 512
# Sizes that fill panels and such that do not: experts, hidden, inner, experts of a row.
SHAPES = ((16, 128, 64, 4), (5, 100, 40, 2), (3, 96, 160, 3))


@pytest.fixture(scope="module", params=[variant.name for variant in usable_variants()])
def variant(request):
    return request.param


def _rows(count: int, width: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _norm(width: int) -> Norm:
    return Norm((1 + 0.2 * _rows(1, width, seed=9)[0].float()).to(BF16), EPS)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_computes_its_definition(variant, shape, biases, activation):
    count, hidden, inner, top_k = shape
    kernels, block = kernel_set(variant), random_block(count, hidden, inner, biases=biases)
    routing, experts = packed(kernels, block, top_k=top_k, activation=activation, normalised=False, scale=1.5)
    x, norm, residual = _rows(37, hidden), _norm(hidden), _rows(37, hidden, seed=4)
    rows = kernels.norm_linear(x, norm, kernels.pack_linear(torch.eye(hidden, dtype=BF16), None))
    index, weights = choose(kernels.logits(x, norm, routing.weight), routing)
    truth = expected(rows, index, weights, block, activation)
    # What is between two products is rounded to bfloat16, every expert's result too, and at last the sum.
    spread = truth.square().mean().sqrt()
    for scale, before in ((1.0, None), (0.25, residual)):
        found = kernels.mix_experts(x, norm, routing, experts, scale, None if before is None else before.clone())
        error = found.double() - scale * truth - (0 if before is None else before.double())
        assert error.square().mean().sqrt() < 2.0**-8 * (scale * spread + (before is not None))
        assert error.abs().max() < 2.0**-6 * (scale * truth.abs().max() + (before is not None))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_choose_and_weigh_as_the_reference(variant, scoring, normalised, biased):
    """Every expert gives a value of its own place, so that the sum has the weights. Logits are equal here and there."""
    count, hidden = 70, 96
    kernels, block = kernel_set(variant), random_block(count, hidden, 32)
    block = replace(
        block,
        router=block.router[torch.arange(count) // 2 * 2],
        down=torch.zeros_like(block.down),
        down_bias=torch.eye(count, hidden).to(BF16),
    )
    bias = torch.randn(count, generator=torch.Generator().manual_seed(2)) if biased else None
    options = {"scoring": scoring, "normalised": normalised, "scale": 2.0, "selection_bias": bias}
    routing, experts = packed(kernels, block, top_k=6, **options)
    x = _rows(50, hidden)
    logits = kernels.linear(x, routing.weight, True)
    assert torch.equal(logits[:, 0::2], logits[:, 1::2])
    index, weights = choose(logits, routing)
    wanted = torch.zeros(50, hidden).scatter(1, index, weights)
    found = kernels.mix_experts(x, None, routing, experts, 1.0, None).float()
    assert torch.equal(found > 0, wanted > 0)
    assert ((found - wanted).abs() <= 1.01 * 2.0**-8 * wanted).all()


# As families have them: DeepSeek-V3's groups by two experts, DeepSeek-V2's by one, Ernie's least sum, Gemma 4's scales.
FORMS = {
    "groups": {"scoring": "sigmoid", "groups": 10, "kept_groups": 3, "epsilon": 1e-20, "bias": True},
    "groups by one": {"groups": 7, "kept_groups": 2, "best_of_group": 1, "normalised": False},
    "least sum": {"least_sum": 0.75, "bias": True},
    "scales": {"scales": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_routing_is_the_references(variant, form):
    """Bitwise the same choice, and alone as among others."""
    options = dict(FORMS[form])
    random, count, hidden = torch.Generator().manual_seed(2), 70, 96
    bias = 0.2 * torch.randn(count, generator=random) if options.pop("bias", False) else None
    scales = 0.5 + torch.rand(count, generator=random) if options.pop("scales", False) else None
    kernels, block = kernel_set(variant), random_block(count, hidden, 32)
    block = replace(block, down=torch.zeros_like(block.down), down_bias=torch.eye(count, hidden).to(BF16))
    routing, experts = packed(
        kernels, block, top_k=6, scale=2.0, selection_bias=bias, expert_scales=scales, norm=_norm(hidden), **options
    )
    x = _rows(50, hidden)
    index, weights = choose(kernels.logits(x, routing.norm, routing.weight), routing)
    wanted = torch.zeros(50, hidden).scatter(1, index, weights)
    mixed = kernels.mix_experts(x, None, routing, experts, 1.0, None)
    found = mixed.float()
    assert torch.equal(found > 0, wanted > 0)
    assert ((found - wanted).abs() <= 1.01 * 2.0**-8 * wanted).all()
    for first, last in ((0, 1), (3, 10), (49, 50)):
        assert torch.equal(kernels.mix_experts(x[first:last], None, routing, experts, 1.0, None), mixed[first:last])


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_router_of_float32_keeps_its_numbers(variant, parts):
    """As the sum of matrices of bfloat16; and what a row chooses is what it is mixed from."""
    kernels, random = kernel_set(variant), torch.Generator().manual_seed(6)
    whole = torch.randn(20, 96, generator=random)
    kept = whole.bfloat16().float()
    for _ in range(parts - 1):
        kept = kept + (whole - kept).bfloat16().float()
    weight = kernels.pack_router(kept, None)
    assert weight.num_outputs == 20 * parts
    routing, x = Routing(weight=weight, top_k=3, norm=_norm(96)), _rows(37, 96)
    logits, index, weights = kernels.route(x, routing, 20)
    rows = kernels.norm_linear(x, routing.norm, kernels.pack_linear(torch.eye(96, dtype=BF16), None))
    truth = rows.double() @ kept.double().T
    assert (logits - truth).abs().max() < 2.0**-18 * truth.abs().max()
    wanted, shares = choose(logits, routing)
    assert torch.equal(index, wanted)
    assert torch.allclose(weights, shares, rtol=1e-6)
    for first, last in ((0, 0), (0, 1), (5, 30)):
        alone = kernels.route(x[first:last], routing, 20)
        assert all(
            torch.equal(some, each[first:last]) for some, each in zip(alone, (logits, index, weights), strict=True)
        )


@pytest.mark.parametrize("width", [40, 64, 2000])
def test_a_gate_multiplies_rows(variant, width):
    """As the reference to one rounding, and each row with the same bits alone."""
    kernels, hidden = kernel_set(variant), 100
    x, wide, weight, norm = _rows(37, hidden), _rows(37, width, seed=4), _rows(1, hidden, seed=5), _norm(hidden)
    gate = kernels.pack_router(weight, None)
    found = kernels.gate_rows(x, norm, gate, wide.clone())
    truth = wide.double() * torch.sigmoid(kernels.logits(x, norm, gate).double())
    assert ((found - truth).abs() <= 2.0**-8 * truth.abs()).all()
    for first, last in ((0, 0), (0, 1), (5, 21), (36, 37)):
        alone = kernels.gate_rows(x[first:last], norm, gate, wide[first:last].clone())
        assert torch.equal(alone, found[first:last])
    with pytest.raises(ValueError, match="has one output, not 2"):
        kernels.gate_rows(x, norm, kernels.pack_router(weight.expand(2, -1).contiguous(), None), wide)
    with pytest.raises(ValueError, match="37 rows cannot gate 3"):
        kernels.gate_rows(x, norm, gate, wide[:3].clone())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_is_that_of_single_products(variant, kind, shape):
    """Bitwise what the ops of dense matrices give expert by expert."""
    count, hidden, inner, top_k = shape
    kernels, block = kernel_set(variant, kind), random_block(count, hidden, inner, biases=True)
    _, experts = packed(kernels, block, top_k=top_k)
    x, random = _rows(61, hidden), torch.Generator().manual_seed(5)
    index = torch.stack([torch.randperm(count + 1, generator=random)[:top_k] for _ in range(61)])
    weights = torch.rand(61, top_k, generator=random)
    each = torch.zeros(61, top_k, hidden)
    for expert in range(count):
        pair = torch.cat([block.gate_bias[expert], block.up_bias[expert]])
        up = kernels.pack_gate_up(block.gate[expert], block.up[expert], pair)
        down = kernels.pack_linear(block.down[expert], block.down_bias[expert])
        row, rank = torch.where(index == expert)
        if len(row):
            each[row, rank] = kernels.linear(kernels.norm_gate_up(x[row], None, up, "silu"), down, False).float()
    total = torch.zeros(61, hidden)
    for rank in range(top_k):
        total = total + weights[:, rank, None] * each[:, rank]
    assert torch.equal(kernels.given_experts(x, index, weights, experts), total.to(BF16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_the_others(variant, kind, shape):
    """Bitwise alone and among up to 512, in any order, with one, two and three threads, beside a row of NaN."""
    count, hidden, inner, top_k = shape
    block = random_block(count, hidden, inner)
    x, residual, norm = _rows(MOST_ROWS, hidden), _rows(MOST_ROWS, hidden, seed=4), _norm(hidden)

    def mix(chosen: torch.Tensor, threads: int = 2) -> torch.Tensor:
        kernels = kernel_set(variant, kind, threads)
        routing, experts = packed(kernels, block, top_k=top_k)
        return kernels.mix_experts(x[chosen], norm, routing, experts, 1.0, residual[chosen])

    whole = mix(torch.arange(MOST_ROWS))
    assert torch.isfinite(whole).all()
    order = torch.randperm(MOST_ROWS, generator=torch.Generator().manual_seed(1))
    for rows in (0, *range(1, 10), 13, 16, 17, 31, 33, 64, 100, 200, 333, MOST_ROWS):
        assert torch.equal(mix(order[:rows]), whole[order[:rows]]), f"{rows} rows"
    for threads in (1, 3):
        for rows in (1, 5, 100, MOST_ROWS):
            assert torch.equal(mix(order[:rows], threads), whole[order[:rows]]), f"{rows} rows, {threads} threads"
    x[7] = torch.nan
    broken = mix(torch.arange(40))
    assert not torch.isfinite(broken[7]).any()
    kept = [row for row in range(40) if row != 7]
    assert torch.equal(broken[kept], whole[kept])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_meet_in_one_expert_or_nowhere(variant, kind):
    """All rows to one expert, one row to each, experts without rows, rows without an expert."""
    count, hidden, inner = 40, 96, 64
    kernels, block = kernel_set(variant, kind), random_block(count, hidden, inner)
    _, experts = packed(kernels, block, top_k=1)
    x, ones = _rows(MOST_ROWS, hidden), torch.ones(MOST_ROWS, 1)

    def give(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return kernels.given_experts(rows, index[:, None], ones[: len(rows)], experts)

    alone = torch.cat([give(x[:1], torch.tensor([expert])) for expert in range(count)])
    assert len(alone.unique(dim=0)) == count
    together = give(x[:1].expand(count, -1).contiguous(), torch.arange(count))
    assert torch.equal(together, alone)
    for expert in (0, 17, count - 1):
        index = torch.full((MOST_ROWS,), expert)
        one = give(x, index)
        for rows in (1, 4, 5, 16, 33, 300):
            assert torch.equal(give(x[:rows], index[:rows]), one[:rows])
    for nowhere in (-1, count):
        index = torch.full((MOST_ROWS,), nowhere)
        assert not give(x, index).any()
        index[5] = 3
        assert torch.equal(give(x, index)[5], give(x[5:6], torch.tensor([3]))[0])
    assert give(x[:0], torch.zeros(0, dtype=torch.int64)).shape == (0, hidden)


@pytest.mark.parametrize(("name", "hidden", "inner"), [("q4_k", 256, 256), ("six bits", 256, 96), ("awq", 160, 40)])
def test_experts_that_others_quantised_are_their_single_products(variant, name, hidden, inner):
    """Bitwise, for rows alone and together, with one, two and three threads."""
    count, top_k, number = 5, 2, 61
    stored = [stored_matrix(name, inner, hidden, seed=seed) for seed in range(count)]
    above = [stored_matrix(name, inner, hidden, seed=100 + seed) for seed in range(count)]
    below = [stored_matrix(name, hidden, inner, seed=200 + seed) for seed in range(count)]
    x, random = _rows(number, hidden), torch.Generator().manual_seed(5)
    index = torch.stack([torch.randperm(count + 1, generator=random)[:top_k] for _ in range(number)])
    weights = torch.rand(number, top_k, generator=random)

    def filled(matrices):
        rows = expert_rows(matrices[0].shape[0])
        return [each.over_rows(lambda part: F.pad(part, (0, 0, 0, rows - len(part)))) for each in matrices]

    def block(kernels):
        return ExpertMatrices(
            count=count,
            inner=inner,
            gate_up=kernels.pack_stored([[joined(filled(stored))], [joined(filled(above))]], None),
            down=kernels.pack_stored([[joined(filled(below))]], None),
            activation="silu",
        )

    kernels = kernel_set(variant)
    each = torch.zeros(number, top_k, hidden)
    for expert in range(count):
        up = kernels.pack_stored([[stored[expert]], [above[expert]]], None)
        down = kernels.pack_stored([[below[expert]]], None)
        row, rank = torch.where(index == expert)
        each[row, rank] = kernels.linear(kernels.norm_gate_up(x[row], None, up, "silu"), down, False).float()
    total = torch.zeros(number, hidden)
    for rank in range(top_k):
        total = total + weights[:, rank, None] * each[:, rank]
    whole = kernels.given_experts(x, index, weights, block(kernels))
    assert torch.equal(whole, total.to(BF16))
    for threads in (2, 1, 3):
        kernels = kernel_set(variant, None, threads)
        experts = block(kernels)
        for rows in (1, 2, 7, 20, number):
            assert torch.equal(kernels.given_experts(x[:rows], index[:rows], weights[:rows], experts), whole[:rows])


def test_the_router_is_not_quantised(variant):
    """A row's experts are those of the model as it is stored, for every kind of weights."""
    block, x = random_block(16, 128, 64), _rows(9, 128)
    found = []
    for kind in KINDS:
        kernels = kernel_set(variant, kind)
        found.append(kernels.linear(x, kernels.pack_router(block.router, None), True))
    assert all(torch.equal(each, found[0]) for each in found)


def test_what_does_not_fit_is_refused():
    kernels, block = kernel_set(usable_variants()[0].name), random_block(4, 96, 64)
    routing, experts = packed(kernels, block, top_k=2)
    x = _rows(3, 96)
    with pytest.raises(ValueError, match="sizes of 3 experts do not fit"):
        kernels.given_experts(x, torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2), replace(experts, count=3))
    with pytest.raises(ValueError, match="sizes of 4 experts do not fit"):
        kernels.mix_experts(x, None, routing, replace(experts, inner=65), 1.0, None)
    with pytest.raises(ValueError, match="5 of 4 experts cannot be chosen"):
        kernels.mix_experts(x, None, replace(routing, top_k=5), experts, 1.0, None)
    with pytest.raises(ValueError, match="selection bias must be"):
        kernels.mix_experts(x, None, replace(routing, selection_bias=torch.zeros(3)), experts, 1.0, None)
    with pytest.raises(ValueError, match=r"given as torch.int64 \[3, k\]"):
        kernels.given_experts(x, torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3, 2), experts)
    experts.down.args.kind = STACKED
    with pytest.raises(ValueError, match="all experts of a layer must be packed in one form"):
        kernels.mix_experts(x, None, routing, experts, 1.0, None)
    experts.down.args.kind = 0
    narrow = kernels.pack_router(block.router[:3], None)
    with pytest.raises(ValueError, match="must map 96 values to 4 experts"):
        kernels.mix_experts(x, None, replace(routing, weight=narrow), experts, 1.0, None)
