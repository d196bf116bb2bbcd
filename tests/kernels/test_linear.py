"""Projections and norms: their definition in float64, and the independence of rows, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import get_args

import pytest
import torch

from quire_kernels.activations import Activation
from quire_kernels.kernel_set import Norm
from quire_kernels.reference import REFERENCE, linear
from support.activations import EXPECTED
from support.model_steps import DEVICES

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = tuple(TOLERANCE)
# Odd sizes leave vector remainders; 3072 columns are where libraries begin to split sums.
SHAPES = ((96, 136), (50, 33), (3072, 64))  # K, N


def _operands(columns: int, rows: int, dtype: torch.dtype, num_rows: int = 70, device: str = "cpu"):
    """x [M, K], norm [K], weight [N, K], bias [N], residual [M, N]."""
    random = torch.Generator().manual_seed(columns + rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    tensors = (
        normal(num_rows, columns),
        1 + 0.2 * normal(columns),
        normal(rows, columns) / columns**0.5,
        normal(rows),
        normal(num_rows, rows),
    )
    return tuple(tensor.to(device, dtype) for tensor in tensors)


def _gate_up(norm: torch.Tensor, pair: linear.Linear, activation: Activation, x: torch.Tensor, *_) -> torch.Tensor:
    return REFERENCE.norm_gate_up(x, Norm(norm, EPS), pair, activation)


def _ops(columns: int, rows: int, dtype: torch.dtype):
    """Each op as a function of the rows alone: of x [M, K] and a residual [M, N]."""
    _, norm, weight, bias, _ = _operands(columns, rows, dtype)
    plain, biased = REFERENCE.pack_linear(weight, None), REFERENCE.pack_linear(weight, bias)
    gate_up = REFERENCE.pack_gate_up(weight, weight.flip(0), torch.cat([bias, bias.flip(0)]))
    return {
        "norm_linear": lambda x, _: REFERENCE.norm_linear(x, Norm(norm, EPS), biased),
        **{f"norm_gate_up {each}": partial(_gate_up, norm, gate_up, each) for each in get_args(Activation)},
        "linear_add": lambda x, residual: REFERENCE.linear_add(x, plain, residual.clone()),
        "norm_linear by a wide norm": lambda x, _: REFERENCE.norm_linear(x, Norm(norm.float(), EPS), biased),
        "norm_linear by a centred norm": lambda x, _: REFERENCE.norm_linear(x, Norm(norm.float(), EPS, True), biased),
        "mul_sigmoid": lambda x, _: REFERENCE.mul_sigmoid(x, x.flip(1)),
        "norm_add": lambda x, _: REFERENCE.norm_add(x, Norm(norm, EPS), x.clone()),
        "logits": lambda x, _: REFERENCE.logits(x, Norm(norm, EPS), plain),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_op_computes_its_definition(dtype, device):
    x, norm, weight, bias, residual = _operands(96, 136, dtype, num_rows=37, device=device)
    wide = [t.double() for t in (x, norm, weight, bias, residual)]
    normed = wide[0] / (wide[0].square().mean(-1, keepdim=True) + EPS).sqrt() * wide[1]
    gate = normed @ wide[2].T + wide[3]
    up = normed @ wide[2].flip(0).T
    gate_only_bias = torch.cat([bias, torch.zeros_like(bias)])
    tolerance = TOLERANCE[dtype]
    pair = REFERENCE.pack_gate_up(weight, weight.flip(0), gate_only_bias)
    cases = {
        "norm_linear": (REFERENCE.norm_linear(x, Norm(norm, EPS), REFERENCE.pack_linear(weight, bias)), gate),
        **{
            f"norm_gate_up {each}": (_gate_up(norm, pair, each, x), EXPECTED[each].gated(gate, up))
            for each in get_args(Activation)
        },
        "norm_linear by a wide norm": (
            REFERENCE.norm_linear(x, Norm(norm.float(), EPS), REFERENCE.pack_linear(weight, bias)),
            gate,
        ),
        "norm_linear by a centred norm": (
            REFERENCE.norm_linear(x, Norm(norm.float(), EPS, True), REFERENCE.pack_linear(weight, bias)),
            torch.nn.functional.layer_norm(wide[0], (96,), wide[1], eps=EPS) @ wide[2].T + wide[3],
        ),
        "norm_linear without a norm": (
            REFERENCE.norm_linear(x, None, REFERENCE.pack_linear(weight, bias)),
            wide[0] @ wide[2].T + wide[3],
        ),
        "linear_add of a part": (
            REFERENCE.linear_add(x, REFERENCE.pack_linear(weight, bias), residual.clone(), 0.22),
            wide[4] + 0.22 * (wide[0] @ wide[2].T + wide[3]),
        ),
        "mul_sigmoid": (REFERENCE.mul_sigmoid(x, x.flip(1)), wide[0] * wide[0].flip(1).sigmoid()),
        "norm_add": (REFERENCE.norm_add(x, Norm(norm, EPS), x.clone()), normed + wide[0]),
        "linear_add": (
            REFERENCE.linear_add(x, REFERENCE.pack_linear(weight, bias), residual.clone()),
            wide[4] + wide[0] @ wide[2].T + wide[3],
        ),
        "logits": (REFERENCE.logits(x, Norm(norm, EPS), REFERENCE.pack_linear(weight, None)), normed @ wide[2].T),
    }
    for name, (result, expected) in cases.items():
        assert result.dtype == (torch.float32 if name == "logits" else dtype), name
        error = (result.double() - expected).abs().max() / expected.abs().max()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "rows"), SHAPES)
def test_a_row_does_not_depend_on_the_number_or_order_of_rows(columns, rows, dtype):
    x, *_, residual = _operands(columns, rows, dtype)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    for name, op in _ops(columns, rows, dtype).items():
        whole = op(x, residual)
        counts = range(1, len(x) + 1) if columns < 1000 else (*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, len(x))
        for num_rows in counts:
            chosen = order[:num_rows]
            assert torch.equal(op(x[chosen], residual[chosen]), whole[chosen]), f"{name} of {num_rows} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 6e4])
def test_a_row_does_not_depend_on_what_its_neighbours_hold(poison, dtype):
    x, *_, residual = _operands(96, 136, dtype)
    for name, op in _ops(96, 136, dtype).items():
        whole = op(x, residual)
        for row in (0, 1, 15, 16, 31, 47, 63, 64, 69):
            poisoned, poisoned_residual = torch.full_like(x, poison), torch.full_like(residual, poison)
            poisoned[row], poisoned_residual[row] = x[row], residual[row]
            assert torch.equal(op(poisoned, poisoned_residual)[row], whole[row]), f"{name}, row {row}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        (3072, 200),  # sums that are long enough to be divided
        (64, 3001),  # columns that are
        (16, 33),  # and a remainder of less than a vector, which alone is summed otherwise
        (64, 100),
        (256, 512 + 17),
    ],
)
def test_a_row_does_not_depend_on_the_number_of_threads(columns, rows, dtype):
    x, *_, residual = _operands(columns, rows, dtype, num_rows=20)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 4, 8):
            torch.set_num_threads(count)
            results.append({name: op(x, residual) for name, op in _ops(columns, rows, dtype).items()})
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    for count, others in zip((2, 3, 4, 8), results[1:], strict=True):
        for name, result in results[0].items():
            assert torch.equal(result, others[name]), f"{name} by {count} threads"


def test_embedding_picks_rows():
    table = torch.arange(12.0).view(4, 3)
    assert torch.equal(REFERENCE.embed(table, torch.tensor([3, 0, 3])), table[[3, 0, 3]])


def test_rms_norm_of_16_bit_rows_is_computed_in_32_bits():
    """Squares of large float16 values overflow in float16."""
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)
    assert torch.equal(linear.rms_norm(x, torch.ones(8, dtype=torch.float16), EPS), torch.ones_like(x))
