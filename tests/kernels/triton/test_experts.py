"""Mixtures of experts: their definition, the rule for ties, rows bit for bit, nothing touched beside them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from quire_kernels.activations import Activation
from quire_kernels.kernel_set import KernelSet, Norm, Routing
from quire_kernels.reference import REFERENCE
from quire_kernels.reference import experts as reference
from quire_kernels.reference.linear import Linear
from quire_kernels.triton import experts as triton_experts
from quire_kernels.triton.set import make_triton_set
from support.experts import Block, packed, random_block
from support.guarded import DEVICE, between_guards, guarded
from support.planted import noticed, planted

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
EPS = 1e-5


def _rows(count: int, width: int, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> torch.Tensor:
    return between_guards(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype))


def _on_device(block: Block) -> Block:
    parts = {name: getattr(block, name) for name in Block.__dataclass_fields__}
    return Block(**{name: None if part is None else part.to(DEVICE) for name, part in parts.items()})


def _check(module, activation: Activation, dtype: torch.dtype, *, biases: bool, rows: int = 9) -> None:
    """Against the reference in float64. Experts are chosen by the numbers of the rows themselves."""
    block = random_block(5, 72, 40, biases=biases, dtype=dtype)
    x, residual = _rows(rows, 72, dtype), _rows(rows, 72, dtype, seed=8)
    norm = Norm(between_guards(torch.full((72,), 3.0, dtype=dtype)), EPS)
    routing, matrices = packed(make_triton_set(), _on_device(block), top_k=2, activation=activation, scale=1.5)
    plain_set: KernelSet = REFERENCE
    wide = Block(
        **{
            name: None if (part := getattr(block, name)) is None else part.double().to(DEVICE)
            for name in Block.__dataclass_fields__
        }
    )
    exact_routing, exact = packed(plain_set, wide, top_k=2, activation=activation, scale=1.5)
    exact_norm = Norm(norm.weight.double(), EPS)
    truth = REFERENCE.mix_experts(x.double(), exact_norm, exact_routing, exact, 1.0, None)
    for same_tiles in (False, True):
        ops = module.ExpertOps(same_tiles=same_tiles)
        with guarded():
            alone = ops.mix_experts(x, norm, routing, matrices, 1.0, None)
            added = ops.mix_experts(x, norm, routing, matrices, 0.25, between_guards(residual))
        for found, wanted in ((alone, truth), (added, residual.double() + 0.25 * truth)):
            assert found.dtype == dtype
            error = (found.double() - wanted).abs().max() / wanted.abs().max()
            assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_block_computes_its_definition(activation, dtype):
    _check(triton_experts, activation, dtype, biases=activation != "silu")


def test_an_expert_of_many_rows_takes_several_tiles(monkeypatch):
    monkeypatch.setattr(triton_experts, "_ROWS", 16)
    _check(triton_experts, "silu", torch.bfloat16, biases=True, rows=60)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalised": False, "scale": 2.5},
        {"scoring": "sigmoid"},
        {"scoring": "sigmoid", "selection_bias": torch.linspace(-1, 1, 70), "normalised": False},
        {"groups": 7, "kept_groups": 3, "best_of_group": 1, "expert_scales": torch.linspace(0.5, 1.5, 70)},
        {
            "groups": 10,
            "kept_groups": 2,
            "scoring": "sigmoid",
            "selection_bias": torch.linspace(-1, 1, 70).sin(),
            "epsilon": 1e-3,
        },
        {"least_sum": 0.9, "scale": 2.0},
    ],
    ids=lambda options: ",".join(options) or "softmax",
)
def test_the_choice_is_the_references(options):
    """Rows that equal the logits choose of them; equal logits, of which the lower expert wins, and a row of NaN."""
    options = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    router = Linear(between_guards(torch.eye(70).bfloat16()), None)
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits[1], logits[2] = 0.0, (torch.arange(70) % 2).bfloat16()
    logits = between_guards(logits)
    routing = Routing(weight=router, top_k=5, **options)
    with guarded():
        _, index, weights = triton_experts._routed(logits, routing, 70)
    wanted, wanted_weights = reference.choose(logits.float(), routing)
    assert torch.equal(index.long(), wanted)
    assert torch.allclose(weights, wanted_weights, rtol=1e-6)
    logits[4] = torch.nan
    _, index, weights = triton_experts._routed(logits, routing, 70)
    assert torch.equal(index[:4].long(), wanted[:4])
    assert weights[4].isnan().all()
    assert sorted(set(index[4].tolist())) == sorted(index[4].tolist())
    assert all(0 <= each < 70 for each in index[4].tolist())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_router_of_float32_is_not_rounded(dtype):
    """With a norm of its own and a bias, as the op of its own gives it."""
    x = _rows(9, 200, dtype)
    weight = between_guards(torch.randn(6, 200, generator=torch.Generator().manual_seed(5)) / 14)
    bias = between_guards(torch.linspace(-1, 1, 6))
    norm = Norm(between_guards(torch.full((200,), 1.5)), EPS)
    routing = Routing(weight=Linear(weight, bias), top_k=2, norm=norm)
    with guarded():
        logits, index, weights = triton_experts.ExpertOps(same_tiles=True).route(x, routing, 6)
    wanted, chosen, truth = REFERENCE.route(x, routing, 6)
    assert index.dtype == torch.int64
    assert torch.equal(index, chosen)
    assert torch.allclose(logits, wanted, atol=1e-5, rtol=1e-5)
    assert torch.allclose(weights, truth, atol=1e-5)


def test_rows_times_the_sigmoid_of_one_logit_each():
    x, wide = _rows(5, 40), _rows(5, 1100, seed=9)
    w, norm = Linear(_rows(1, 40, seed=10), None), Norm(torch.full((40,), 2.0, device=DEVICE), EPS)
    expected = reference.gate_rows(x, norm, w, wide)
    with guarded():
        found = triton_experts.ExpertOps(same_tiles=False).gate_rows(x, norm, w, wide)
    assert torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-3)


def test_pairs_are_grouped_by_expert_in_their_order():
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(-1, 6, (1500,), generator=generator, dtype=torch.int32).to(DEVICE)  # -1 and 5 are none of 5
    order, starts = torch.full_like(index, -7), torch.full((6,), -7, dtype=torch.int32, device=DEVICE)
    triton_experts.group_kernel[(6,)](index, order, starts, 1500, PAIRS=1024)
    found = index.cpu().tolist()
    wanted = [pair for expert in range(5) for pair in range(1500) if found[pair] == expert]
    assert order.tolist()[: len(wanted)] == wanted
    assert set(order.tolist()[len(wanted) :]) == {-7}
    assert starts.tolist() == [sum(0 <= each < expert for each in found) for expert in range(6)]


def test_a_row_does_not_depend_on_the_others():
    routing, matrices = packed(make_triton_set(), _on_device(random_block(6, 64, 48, biases=True)), top_k=3)
    x, residual = _rows(70, 64), _rows(70, 64, seed=9)
    norm = Norm(torch.ones(64, dtype=torch.bfloat16, device=DEVICE), EPS)
    ops = triton_experts.ExpertOps(same_tiles=True)
    whole = ops.mix_experts(x, norm, routing, matrices, 1.0, between_guards(residual))
    for rows in ([0], [69], [5, 3, 68], list(range(20, 57))):
        found = ops.mix_experts(x[rows], norm, routing, matrices, 1.0, residual[rows])
        assert torch.equal(found, whole[rows]), rows
    broken = x.clone()
    broken[3] = torch.nan
    found = ops.mix_experts(broken, norm, routing, matrices, 1.0, between_guards(residual))
    assert not found[3].isfinite().any()
    kept = [row for row in range(70) if row != 3]
    assert torch.equal(found[kept], whole[kept])


def test_given_experts_and_an_index_that_is_no_experts():
    _, matrices = packed(make_triton_set(), _on_device(random_block(3, 40, 24)), top_k=2)
    x, ops = _rows(4, 40), triton_experts.ExpertOps(same_tiles=False)
    index = torch.tensor([[1, 3], [3, 3], [0, 2], [-1, 2]], device=DEVICE)
    weights = torch.tensor([[0.5, torch.nan], [1.0, 1.0], [0.25, 4.0], [1.0, 1.0]], device=DEVICE)
    with guarded():
        found = ops.given_experts(x, index, weights, matrices)
    wanted = REFERENCE.given_experts(x, index, weights.nan_to_num(), matrices)
    assert torch.allclose(found.float(), wanted.float(), atol=2e-2, rtol=2e-2)
    assert not found[1].any()
    assert ops.given_experts(x[:0], index[:0], weights[:0], matrices).shape == (0, 40)


def test_what_does_not_fit_is_refused():
    routing, matrices = packed(make_triton_set(), _on_device(random_block(3, 40, 24)), top_k=2)
    ops = triton_experts.ExpertOps(same_tiles=False)
    for rows in (_rows(2, 39), _rows(2, 40, torch.float16)):
        with pytest.raises(ValueError, match="a router to 3"):
            ops.mix_experts(rows, None, routing, matrices, 1.0, None)
        with pytest.raises(ValueError, match=r"experts of .* need"):
            ops.given_experts(rows, torch.zeros(2, 1), torch.ones(2, 1), matrices)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value * tl.load(weights + pair)", "value * tl.load(weights + row)"),
        (
            "tl.store(into, total.to(outputs.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])",
            "tl.store(into, total.to(outputs.dtype.element_ty), mask=row_inside[:, None])",
        ),
        ("gate.to(dtype).to(tl.float32), up.to", "up.to(dtype).to(tl.float32), gate.to"),
        ("other=0) // TOP_K", "other=0)"),
    ],
    ids=["one weight for all", "an unmasked store", "the gate for up", "pairs for rows"],
)
def test_planted_bugs_are_found(old, new, tmp_path):
    with pytest.raises(noticed()):
        _check(planted(triton_experts, old, new, tmp_path), "silu", torch.bfloat16, biases=True)
