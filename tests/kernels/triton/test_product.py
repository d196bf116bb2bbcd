"""Projections: their definition, and of the tiled ones that a row's bits do not depend on the rest of the call."""

from __future__ import annotations

import sys
from typing import get_args

import pytest
import torch

from quire_kernels.activations import Activation, gated
from quire_kernels.reference.linear import Linear
from quire_kernels.triton import product
from support.guarded import between_guards, guarded
from support.planted import noticed, planted

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
PRODUCTS = {"torch": product.TorchProduct, "tiled": product.TiledProduct}
# K, N: whole tiles; remainders of both; remainders that leave no alignment.
SHAPES = ((128, 64), (200, 72), (75, 33))


def _operands(depth: int, columns: int, dtype: torch.dtype, num_rows: int = 70, bias: bool = True):
    random = torch.Generator().manual_seed(depth + columns)

    def normal(*shape: int) -> torch.Tensor:
        return between_guards(torch.randn(shape, generator=random).to(dtype))

    x, weight, residual = normal(num_rows, depth), normal(columns, depth), normal(num_rows, columns)
    weight.mul_(depth**-0.5)
    return x, Linear(weight, normal(columns) if bias else None), residual


def _check(tiled, depth: int, columns: int, dtype: torch.dtype, num_rows: int = 70) -> None:
    x, w, residual = _operands(depth, columns, dtype, num_rows)
    plain = Linear(w.weight, None)
    exact = x.double() @ w.weight.double().T
    with guarded():
        found = {
            "linear": (tiled.linear(x, w), exact + w.bias.double()),
            "plain": (tiled.linear(x, plain), exact),
            "add": (tiled.linear_add(x, plain, between_guards(residual)), exact + residual.double()),
            "add with bias": (
                tiled.linear_add(x, w, between_guards(residual)),
                exact + w.bias.double() + residual.double(),
            ),
            "add a part": (
                tiled.linear_add(x, plain, between_guards(residual), 0.22),
                0.22 * exact + residual.double(),
            ),
            "logits": (tiled.logits(x, plain), exact),
        }
    for name, (result, expected) in found.items():
        assert result.dtype == (torch.float32 if name == "logits" else dtype), name
        close = torch.allclose(result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert close, f"{name}: {(result.double() - expected).abs().max()}"
    assert torch.equal(found["logits"][0], found["plain"][0].float()), "logits are rounded as any product is"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_they_compute_their_definition(depth, columns, kind, dtype):
    _check(PRODUCTS[kind](), depth, columns, dtype)


@pytest.mark.parametrize("columns", [4100, pytest.param(16500, marks=pytest.mark.sim)])
def test_wide_weights_take_wider_tiles(columns):
    x, w, _ = _operands(80, columns, torch.bfloat16, num_rows=3, bias=False)
    expected = x.double() @ w.weight.double().T
    with guarded():
        result = product.TiledProduct().linear(x, w)
    assert torch.allclose(result.double(), expected, rtol=1.2e-2, atol=1.2e-2)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize(("depth", "columns"), SHAPES[1:])
def test_the_gate_is_part_of_the_product(depth, columns, activation):
    """Against the product and the gate one after the other: the same roundings, so the same bits but for their sums."""
    x, w, _ = _operands(depth, 2 * columns, torch.bfloat16)
    tiled = product.TiledProduct()
    with guarded():
        found = tiled.gate_up(x, w, activation)
    both = tiled.linear(x, w)
    wanted = gated(*both.float().chunk(2, dim=1), activation)
    assert torch.allclose(found.float(), wanted, rtol=1.2e-2, atol=1.2e-2)
    for rows in ([0], [69], list(range(3, 67))):
        assert torch.equal(tiled.gate_up(x[rows], w, activation), found[rows])
    assert tiled.gate_up(x[:0], w, activation).shape == (0, columns)
    with pytest.raises(ValueError, match="do not fit"):
        tiled.gate_up(x.half(), w, activation)


def _check_rows(tiled) -> None:
    """130 rows are two tiles of 128, one row is a tile of 64. Terms cancel, so that bf16 shows how they were added."""
    x, w, residual = _operands(200, 72, torch.bfloat16, num_rows=130)
    x[:, 136:] = x[:, 72:136]
    w.weight[:, 72:136] *= 4096
    w.weight[:, 136:] = -w.weight[:, 72:136]
    together = tiled.linear_add(x, w, between_guards(residual))
    for rows in ([0], [129], [63, 64], [5, 127, 128, 2], list(range(40, 107))):
        assert torch.equal(tiled.linear_add(x[rows], w, residual[rows]), together[rows]), f"rows {rows}"


def test_a_row_alone_is_the_row_in_a_batch():
    _check_rows(product.TiledProduct())


def test_a_row_does_not_depend_on_what_its_neighbours_hold():
    x, w, residual = _operands(200, 72, torch.bfloat16)
    tiled = product.TiledProduct()
    together = tiled.linear_add(x, w, between_guards(residual))
    for row in (0, 15, 63, 64, 69):
        poisoned, added = torch.full_like(x, float("nan")), torch.full_like(residual, float("nan"))
        poisoned[row], added[row] = x[row], residual[row]
        assert torch.equal(tiled.linear_add(poisoned, w, added)[row], together[row])


def test_no_rows_and_rows_apart_in_memory():
    x, w, _ = _operands(75, 33, torch.bfloat16, num_rows=6)
    tiled = product.TiledProduct()
    assert tiled.linear(x[:0], w).shape == (0, 33)
    assert torch.equal(tiled.linear(x[::2], w), tiled.linear(x, w)[::2])


def test_what_does_not_fit_is_refused():
    x, w, residual = _operands(75, 33, torch.bfloat16)
    tiled = product.TiledProduct()
    for rows, add in ((x[:, :70], residual), (x.half(), residual.half()), (x[:5], residual)):
        with pytest.raises(ValueError, match="do not fit"):
            tiled.linear_add(rows, w, add)
    with pytest.raises(ValueError, match="contiguous"):
        tiled.linear_add(x, w, residual.t().contiguous().t())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value.to(out.dtype.element_ty), mask=inside)", "value.to(out.dtype.element_ty), mask=row_inside[:, None])"),
        ("mask=column_inside[:, None] & (ks < depth)[None, :]", "mask=column_inside[:, None]"),
        (
            "tl.range(tl.program_id(0), num_tiles, tl.num_programs(0))",
            "tl.range(tl.program_id(0), num_tiles - 1, tl.num_programs(0))",
        ),
    ],
    ids=["unmasked columns", "unmasked depth", "tiles left out"],
)
def test_planted_bugs_are_found(old, new, tmp_path):
    with pytest.raises(noticed()):
        _check(planted(product, old, new, tmp_path).TiledProduct(), 75, 133, torch.bfloat16)


@pytest.mark.skipif("ttsem" in sys.modules, reason="the sanitizer adds up term by term, whatever the step over k")
def test_a_planted_dependence_on_the_number_of_rows_is_found(tmp_path):
    module = planted(product, "BLOCK_K=_BLOCK_K,", "BLOCK_K=_BLOCK_K if few else 32,", tmp_path)
    with pytest.raises(AssertionError, match="rows"):
        _check_rows(module.TiledProduct())
