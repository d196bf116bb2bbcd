"""Products with matrices as others quantised them: read back exactly, their definition, and rows bit for bit."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.triton import stored_product
from quire_kernels.triton.stored_product import StoredProduct, pack_stored
from support.cpu_stored import FORMS, stored_matrix
from support.guarded import DEVICE, between_guards, guarded
from support.planted import noticed, planted

NARROW = [name for name in FORMS if stored_matrix(name, 8, 256).group_size == 16]
TAKEN = [name for name in FORMS if name not in NARROW]
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def _packed(module, name: str, n: int, k: int, bias: torch.Tensor | None = None):
    return module.pack_stored([[stored_matrix(name, n, k).to(DEVICE)]], bias)


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return between_guards(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype))


def _check(  # noqa: PLR0917 - a matrix and its rows
    module, name: str, n: int, k: int, rows: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Against the reference's numbers of the matrix; all numbers of the result are about 1."""
    weight = stored_matrix(name, n, k).dequantised().to(DEVICE).double()
    x, residual, bias = _normal(rows, k, dtype=dtype), _normal(rows, n, dtype=dtype), _normal(n, dtype=dtype)
    exact = x.double() @ weight.T
    plain, biased = _packed(module, name, n, k), _packed(module, name, n, k, bias)
    for same_tiles in (False, True):
        product = module.StoredProduct(same_tiles=same_tiles)
        with guarded():
            found = {
                "linear": (product.linear(x, biased), exact + bias.double()),
                "add": (product.linear_add(x, plain, between_guards(residual), 0.5), 0.5 * exact + residual.double()),
                "logits": (product.logits(x, plain), exact),
            }
        for what, (result, wanted) in found.items():
            assert result.dtype == (torch.float32 if what == "logits" else dtype)
            error = (result.double() - wanted).abs().max() / max(1.0, float(wanted.abs().max()))
            assert error < TOLERANCE[dtype], (what, error)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_they_compute_their_definition(name, dtype):
    """Remainders of both sizes, and columns that end within a pair of halves and within a group."""
    _check(stored_product, name, 40, 200, 5, dtype)


def test_many_rows_and_many_columns():
    _check(stored_product, "awq", 200, 256, 70)


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize(("n", "k"), [(6, 32), (40, 200)])
def test_what_is_packed_is_the_matrix_to_the_last_bit(name, n, k):
    """Seen through rows that are one column each, in float16's and bfloat16's exact numbers."""
    packed, exact = _packed(stored_product, name, n, k), stored_matrix(name, n, k).dequantised()
    shown = StoredProduct(same_tiles=True).logits(torch.eye(k, dtype=torch.float16, device=DEVICE), packed)
    assert torch.equal(shown.cpu().T, exact.half().float())


def test_gate_and_up_are_one_matrix():
    whole = stored_matrix("gptq", 64, 128)
    halves = [whole.over_rows(lambda part, rows=rows: part[rows]).to(DEVICE) for rows in (slice(32), slice(32, 64))]
    x = _normal(3, 128)
    product = StoredProduct(same_tiles=True)
    assert torch.equal(
        product.linear(x, pack_stored([[half] for half in halves], None)),
        product.linear(x, _packed(stored_product, "gptq", 64, 128)),
    )


@pytest.mark.parametrize("name", NARROW)
def test_what_has_no_form_is_left_to_be_decoded(name):
    assert pack_stored([[stored_matrix(name, 8, 256)]], None) is None


def test_parts_of_different_forms_get_one_or_are_left_to_be_decoded():
    assert pack_stored([[stored_matrix("awq", 8, 256), stored_matrix("fp8", 8, 256)]], None) is None
    rows = [stored_matrix("q4_1", 8, 256).to(DEVICE), stored_matrix("q8_0", 24, 256).to(DEVICE)]
    x = _normal(3, 256)
    product = StoredProduct(same_tiles=True)
    apart = [product.linear(x, pack_stored([[each]], None)) for each in rows]
    assert torch.allclose(product.linear(x, pack_stored([rows], None)), torch.cat(apart, dim=1), atol=1e-2)


@pytest.mark.parametrize("name", ["awq", "w4a16", "w8a16", "fp8"])
def test_a_row_alone_is_the_row_in_a_batch(name):
    x, w = _normal(130, 200), _packed(stored_product, name, 40, 200)
    product = StoredProduct(same_tiles=True)
    together = product.linear(x, w)
    for rows in ([0], [129], [63, 64, 5]):
        assert torch.equal(product.linear(x[rows], w), together[rows])
    x[1] = torch.nan
    assert torch.equal(product.linear(x, w)[2:], together[2:])


def test_no_rows_and_rows_that_do_not_fit():
    w = _packed(stored_product, "awq", 40, 200)
    product = StoredProduct(same_tiles=False)
    assert product.linear(_normal(2, 200)[:0], w).shape == (0, 40)
    with pytest.raises(ValueError, match="do not fit"):
        product.linear(_normal(2, 199), w)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("low, high = both & 15, both >> 4", "high, low = both & 15, both >> 4"),
        ("group = (k + HALF) // GROUP", "group = k // GROUP"),
        ("mask=row_inside & (ks + HALF < depth)[None, :]", "mask=row_inside"),
        ("whole = whole - points.to(tl.int16)[:, None]", "whole = whole + points.to(tl.int16)[:, None]"),
    ],
    ids=["halves exchanged", "one scale for both", "unmasked depth", "points added"],
)
def test_planted_bugs_are_found(old, new, tmp_path):
    module = planted(stored_product, old, new, tmp_path)
    with pytest.raises(noticed()):  # noqa: PT012 - one of the two shows it
        for name in ("awq", "w4a16"):
            _check(module, name, 40, 200, 5)
