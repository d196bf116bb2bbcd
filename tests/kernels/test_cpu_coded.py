"""bf16 weights kept in twelve bits: the same bits come back, and what cannot be told in twelve stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire_kernels.cpu.variants import usable_variants
from quire_kernels.kernel_set import Norm
from support.cpu_linear import kernel_set

PANEL = 64  # rows that share their exponents
STEP = 2  # columns of a step
SLICE = 4096  # columns that a panel's slice holds
ROWS = (1, 8, 30, 31, 70)  # decoded by each tile of rows, and by the first for the others
TOO_LARGE, TOO_SMALL = 3.0e30, -2.5e-30


@pytest.fixture(scope="module", params=[variant.name for variant in usable_variants()])
def variant(request):
    return request.param


def weights(n: int, k: int) -> Tensor:
    return (0.02 * torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))).bfloat16()


def with_strangers(weight: Tensor) -> Tensor:
    """Weights that twelve bits cannot tell: at both ends, two in one step, in every lane of a panel, past a slice."""
    n, k = weight.shape
    strange = [(0, 0), (n - 1, k - 1), (1, 2), (2, 2), (2, 3), *((lane % n, k // 2) for lane in range(0, PANEL, 9))]
    if k > SLICE:
        strange += [(3, SLICE - 1), (4, SLICE), (5, SLICE + 1)]
    for count, at in enumerate(strange):
        weight[at] = (TOO_LARGE, TOO_SMALL, 0.0)[count % 3]
    return weight


def columns_of(kernels, packed, weight: Tensor, columns: Tensor) -> Tensor:
    """weight[:, columns].T as the products with unit rows see it; sums of zeros and one weight are exact."""
    units = torch.zeros(len(columns), weight.shape[1])
    units[torch.arange(len(columns)), columns] = 1
    return kernels.linear_add(units.bfloat16(), packed, torch.zeros(len(columns), weight.shape[0]).bfloat16())


@pytest.mark.parametrize(("n", "k"), [(64, 1024), (130, 1000), (40, 769), (66, 8352)])
def test_weights_come_back_bit_for_bit(variant, n, k):
    kernels, weight = kernel_set(variant), with_strangers(weights(n, k))
    packed = kernels.pack_linear(weight, None)
    assert kernels.packed_bytes(packed) < 0.8 * 2 * -(-n // PANEL) * PANEL * k
    columns = [0, 1, 2, 3, k // 2, k - 1]
    columns += [column for column in (SLICE - 1, SLICE, SLICE + 1) if column < k]
    for rows in ROWS:
        spread = torch.arange(rows) * 37 % k
        spread[: len(columns)] = torch.tensor(columns)[:rows]
        assert torch.equal(columns_of(kernels, packed, weight, spread), weight[:, spread].T), rows


def test_gate_and_up_rows_decode_alike(variant):
    """The same rows from coded panels and from panels that stay as they are."""
    kernels, n, k = kernel_set(variant), 100, 320
    gate, up = weights(n, k), weights(n + 1, k)[1:].contiguous()
    gate[5, 7] = up[5, 8] = up[70, k - 1] = 0.0
    x = torch.randn(9, k, generator=torch.Generator().manual_seed(3)).bfloat16()
    norm = torch.ones(k).bfloat16()
    coded, plain = kernels.pack_gate_up(gate, up, None), kernels.pack_gate_up(untold(gate), untold(up), None)
    assert kernels.packed_bytes(coded) < 0.8 * kernels.packed_bytes(plain)
    same = torch.arange(n) % 32 > 0
    got, expected = (kernels.norm_gate_up(x, Norm(norm, 1e-6), packed, "silu") for packed in (coded, plain))
    assert torch.equal(got[:, same], expected[:, same])


def untold(weight: Tensor) -> Tensor:
    """With so many strange weights in a few rows of each panel that the panel stays as it is."""
    weight = weight.clone()
    weight[::32, ::2] = TOO_SMALL
    return weight


def test_panels_of_any_exponents_stay_as_they_are(variant):
    kernels = kernel_set(variant)
    n, k = 2 * PANEL, 512
    weight = untold(weights(n, k))
    weight[PANEL:] = weights(PANEL, k)
    packed = kernels.pack_linear(weight, None)
    plain, coded = 2 * PANEL * k, 1.5 * PANEL * k
    assert plain + coded < kernels.packed_bytes(packed) < 1.02 * (plain + coded)
    columns = torch.arange(0, k, 7)
    assert torch.equal(columns_of(kernels, packed, weight, columns), weight[:, columns].T)


def test_exponents_near_both_ends_can_be_told(variant):
    kernels = kernel_set(variant)
    for scale in (2.0**122, 2.0**-118):
        weight = (weights(PANEL, 256).float() / 0.02 * scale).bfloat16()
        assert torch.isfinite(weight).all()
        weight[weight.abs() < torch.finfo(torch.bfloat16).tiny] = 0.0  # products may take these for zeros
        packed = kernels.pack_linear(weight, None)
        assert kernels.packed_bytes(packed) < 0.8 * 2 * PANEL * 256
        columns = torch.arange(0, 256, 5)
        assert torch.equal(columns_of(kernels, packed, weight, columns), weight[:, columns].T)
