"""RMS and layer norms: the reference's definition and roundings, rows of their own, nothing touched beside them."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.kernel_set import Norm
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
    wide, residual = between_guards(weight.float() + 2**-12), between_guards(x.flip(0).contiguous())
    with guarded():
        results = [
            (module.rms_norm(x, Norm(weight, EPS)), linear.rms_norm(x, weight, EPS)),
            (module.rms_norm(x, Norm(wide, EPS)), linear.rms_norm(x, wide, EPS)),
            (module.rms_norm(x + 2, Norm(wide, EPS, True)), linear.normed(x + 2, Norm(wide, EPS, True))),
            (
                module.norm_add(x, Norm(wide, EPS), between_guards(residual.clone())),
                linear.norm_add(x, Norm(wide, EPS), residual.clone()),
            ),
        ]
    for result, expected in results:
        assert result.dtype == dtype
        assert torch.allclose(result.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        # The order of the sum alone may move a result to its neighbour.
        assert (result == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_the_reference_norm(width, dtype):
    _check(norm, width, dtype)


def test_a_row_does_not_depend_on_the_others():
    x, weight = _operands(5, 100, torch.bfloat16)
    together = norm.rms_norm(x, Norm(weight, EPS))
    assert torch.equal(norm.rms_norm(x.flip(0), Norm(weight, EPS)).flip(0), together)
    for row in range(5):
        assert torch.equal(norm.rms_norm(x[row : row + 1], Norm(weight, EPS)), together[row : row + 1])


def test_no_rows_and_rows_apart_in_memory():
    x, weight = _operands(6, 100, torch.bfloat16)
    assert norm.rms_norm(x[:0], Norm(weight, EPS)).shape == (0, 100)
    assert torch.equal(norm.rms_norm(x[::2], Norm(weight, EPS)), norm.rms_norm(x, Norm(weight, EPS))[::2])


def test_squares_of_large_float16_values_do_not_overflow():
    x = torch.full((1, 8), 1000.0, dtype=torch.float16, device=DEVICE)
    assert torch.equal(norm.rms_norm(x, Norm(torch.ones_like(x[0]), EPS)), torch.ones_like(x))


def test_a_weight_that_does_not_fit_is_refused():
    x, weight = _operands(2, 100, torch.bfloat16)
    for wrong in (weight[:50], weight.half()):
        with pytest.raises(ValueError, match="norm must be"):
            norm.rms_norm(x, Norm(wrong, EPS))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value, mask=inside)", "value)"),
        ("wide = tl.load(x + row + columns, mask=inside, other=0.0)", "wide = tl.load(x + row + columns)"),
        ("if not WIDE:", "if False:"),
        ("if not WIDE:", "if True:"),
        ("before.to(tl.float32) + value", "value"),
    ],
    ids=["unmasked store", "unmasked load", "rounded once", "rounded twice", "nothing added"],
)
def test_planted_bugs_are_found(old, new, tmp_path):
    with pytest.raises(noticed()):
        _check(planted(norm, old, new, tmp_path), 1000, torch.bfloat16)
