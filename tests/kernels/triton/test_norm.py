"""RMSNorm: the reference's definition and rounding steps, rows of their own, nothing touched beside them."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.reference import linear
from quire_kernels.triton import norm
from support.guarded import DEVICE, between_guards, guarded
from support.planted import noticed, planted

EPS = 1e-6
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.2e-3}
WIDTHS = (32, 100, 1000)


def _operands(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(width)
    x = 3 * torch.randn(num_rows, width, generator=random)
    weight = 1 + 0.2 * torch.randn(width, generator=random)
    return between_guards(x.to(dtype)), between_guards(weight.to(dtype))


def _check(module, width: int, dtype: torch.dtype) -> None:
    x, weight = _operands(4, width, dtype)
    with guarded():
        result = module.rms_norm(x, weight, EPS)
    expected = linear.rms_norm(x, weight, EPS)
    assert result.dtype == dtype
    assert torch.allclose(result.float(), expected.float(), rtol=TOLERANCE[dtype], atol=1e-4)
    # The order of the sum alone may move a result to its neighbour.
    assert (result == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_the_reference_norm(width, dtype):
    _check(norm, width, dtype)


def test_a_row_does_not_depend_on_the_others():
    x, weight = _operands(5, 100, torch.bfloat16)
    together = norm.rms_norm(x, weight, EPS)
    assert torch.equal(norm.rms_norm(x.flip(0), weight, EPS).flip(0), together)
    for row in range(5):
        assert torch.equal(norm.rms_norm(x[row : row + 1], weight, EPS), together[row : row + 1])


def test_no_rows_and_rows_apart_in_memory():
    x, weight = _operands(6, 100, torch.bfloat16)
    assert norm.rms_norm(x[:0], weight, EPS).shape == (0, 100)
    assert torch.equal(norm.rms_norm(x[::2], weight, EPS), norm.rms_norm(x, weight, EPS)[::2])


def test_squares_of_large_float16_values_do_not_overflow():
    x = torch.full((1, 8), 1000.0, dtype=torch.float16, device=DEVICE)
    assert torch.equal(norm.rms_norm(x, torch.ones_like(x[0]), EPS), torch.ones_like(x))


def test_a_weight_that_does_not_fit_is_refused():
    x, weight = _operands(2, 100, torch.bfloat16)
    for wrong in (weight[:50], weight.half()):
        with pytest.raises(ValueError, match="norm must be"):
            norm.rms_norm(x, wrong, EPS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("normed.to(tl.float32), mask=inside)", "normed.to(tl.float32))"),
        ("wide = tl.load(x + row + columns, mask=inside, other=0.0)", "wide = tl.load(x + row + columns)"),
        (".to(out.dtype.element_ty)\n", "\n"),
    ],
    ids=["unmasked store", "unmasked load", "rounded once"],
)
def test_planted_bugs_are_found(old, new, tmp_path):
    with pytest.raises(noticed()):
        _check(planted(norm, old, new, tmp_path), 1000, torch.bfloat16)
