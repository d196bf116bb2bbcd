"""What adapters add to products: exact up to rounding, and a row's bits alone whatever the other rows are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire_kernels.cpu.variants import usable_variants
from quire_kernels.kernel_set import Addend, KernelSet, Norm
from quire_kernels.low_rank import LowRankMatrix, LowRankPart
from quire_kernels.reference import REFERENCE
from support.cpu_linear import EPS, KINDS, Operands, kernel_set, operands
from support.cpu_stored import stored_matrix

VARIANTS = [variant.name for variant in usable_variants()]
ROWS = 21
# N, K, and of each part its first row, rows and rank: one panel, remainders, several parts that share a panel's half.
SHAPES = (
    (64, 32, ((0, 64, 4),)),
    (130, 33, ((0, 100, 3), (100, 20, 17), (120, 10, 1))),
    (200, 1024, ((0, 96, 16), (128, 64, 8))),
    (96, 100, ((0, 48, 5), (48, 48, 9))),
)
SLOTS = torch.tensor([0, -1, 1, 1, 0, 2, -1, 0, 1, 1, 1, 1, 1, 3, 0, -1, 2, 2, 0, 1, 3], dtype=torch.int32)


def low_rank(n: int, k: int, parts: tuple[tuple[int, int, int], ...], seed: int, *, gate_up: bool) -> LowRankMatrix:
    generator = torch.Generator().manual_seed(seed)
    made = [
        LowRankPart(
            first_row=first,
            shrink=(torch.randn(rank, k, generator=generator) / k**0.5).bfloat16(),
            expand=torch.randn(rows, rank, generator=generator).bfloat16(),
            scale=0.5 + seed,
        )
        for first, rows, rank in parts
    ]
    return LowRankMatrix(num_rows=n, num_inputs=k, gate_up=gate_up, parts=tuple(made))


def run(kernels: KernelSet, given: Operands, parts, slots: Tensor) -> dict[str, Tensor]:
    """Every op with four adapters, the last of which adds nothing."""
    ops, (n, k) = kernels.adapted, given.weight.shape
    assert ops is not None

    def addend(*, gate_up: bool) -> Addend:
        made = [ops.pack(low_rank(n, k, parts, seed, gate_up=gate_up)) for seed in range(3)]
        return Addend(slots=slots, matrices=(*made, None))

    plain, pair = kernels.pack_linear(given.weight, given.bias), kernels.pack_gate_up(*given.halves, given.bias)
    norm = Norm(given.norm, EPS)
    return {
        "norm_linear": ops.norm_linear(given.x, norm, plain, addend(gate_up=False)),
        "project": ops.norm_linear(given.x, None, plain, addend(gate_up=False)),
        "norm_gate_up": ops.norm_gate_up(given.x, norm, pair, "silu", addend(gate_up=True)),
        "linear_add": ops.linear_add(given.x, plain, given.residual.clone(), 0.5, addend(gate_up=False)),
    }


def without(kernels: KernelSet, given: Operands) -> dict[str, Tensor]:
    plain, pair = kernels.pack_linear(given.weight, given.bias), kernels.pack_gate_up(*given.halves, given.bias)
    norm = Norm(given.norm, EPS)
    return {
        "norm_linear": kernels.norm_linear(given.x, norm, plain),
        "project": kernels.norm_linear(given.x, None, plain),
        "norm_gate_up": kernels.norm_gate_up(given.x, norm, pair, "silu"),
        "linear_add": kernels.linear_add(given.x, plain, given.residual.clone(), 0.5),
    }


@pytest.mark.parametrize("variant", [*VARIANTS, "reference"])
@pytest.mark.parametrize(("n", "k", "parts"), SHAPES)
def test_what_is_added_is_right(variant: str, n: int, k: int, parts) -> None:
    kernels = REFERENCE if variant == "reference" else kernel_set(variant)
    given = operands(n, k, ROWS)
    wide = Operands(*(tensor.float() for tensor in given))
    exact, found = run(REFERENCE, wide, parts, SLOTS), run(kernels, given, parts, SLOTS)
    for name, values in found.items():
        bound = 0.02 * exact[name].abs().amax(dim=1, keepdim=True)  # of roundings to bfloat16 on the way
        assert ((values.float() - exact[name]).abs() <= bound).all(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("n", "k", "parts"), SHAPES)
def test_a_row_has_the_bits_that_it_has_alone(variant: str, kind, n: int, k: int, parts) -> None:
    check_alone(kernel_set(variant, kind), n, k, parts)


@pytest.mark.parametrize(("n", "k", "parts"), SHAPES)
def test_a_row_of_the_reference_has_the_bits_that_it_has_alone(n: int, k: int, parts) -> None:
    check_alone(REFERENCE, n, k, parts)


def check_alone(kernels: KernelSet, n: int, k: int, parts) -> None:
    given = operands(n, k, ROWS)
    whole, base = run(kernels, given, parts, SLOTS), without(kernels, given)
    for row in range(ROWS):
        alone = run(kernels, given.rows(slice(row, row + 1)), parts, SLOTS[row : row + 1])
        for name, values in whole.items():
            assert torch.equal(alone[name][0], values[row]), (name, row)
            if SLOTS[row] in (-1, 3):
                assert torch.equal(base[name][row], values[row]), (name, row)
            else:
                assert not torch.equal(base[name][row], values[row]), (name, row)


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_rows_have_the_bits_of_few(variant: str) -> None:
    n, k, parts = SHAPES[2]
    given = operands(n, k, 130)
    slots = torch.arange(130, dtype=torch.int32) % 5 - 1
    whole = run(kernel_set(variant), given, parts, slots)
    some = torch.arange(0, 130, 7)
    few = run(kernel_set(variant, threads=1), given.rows(some), parts, slots[some])
    for name, values in whole.items():
        assert torch.equal(values[some], few[name]), name


def test_rows_of_several_kinds_get_what_each_gets_alone() -> None:
    """Queries, keys and values that others quantised in different ways."""
    kernels, k, sizes = kernel_set(VARIANTS[0]), 256, (128, 64, 70)
    stored = [stored_matrix(name, n, k) for name, n in zip(("q4_k", "six bits", "q8_0"), sizes, strict=True)]
    ops, x, slots = kernels.adapted, operands(262, k, 9).x, torch.tensor([0, -1, 0, 0, -1, 0, 0, 0, -1]).int()
    assert ops is not None
    assert kernels.pack_stored is not None
    whole = low_rank(262, k, ((0, 128, 4), (128, 64, 3), (192, 70, 2)), 0, gate_up=False)
    addend = Addend(slots=slots, matrices=(ops.pack(whole),))
    found = ops.norm_linear(x, None, kernels.pack_stored([stored], None), addend).split(sizes, dim=1)
    for values, matrix, part in zip(found, stored, whole.parts, strict=True):
        one = replace(whole, num_rows=matrix.shape[0], parts=(replace(part, first_row=0),))
        weight = kernels.pack_stored([[matrix]], None)
        alone = ops.norm_linear(x, None, weight, Addend(slots=slots, matrices=(ops.pack(one),)))
        assert torch.equal(values, alone)


def test_the_matrices_of_an_adapter_lie_in_one_piece_of_memory() -> None:
    """Which begins on a huge page, and is filled without gaps but for alignment."""
    ops = kernel_set(VARIANTS[0]).adapted
    assert ops is not None
    packed = [ops.pack(low_rank(*SHAPES[i], i, gate_up=False)) for i in (1, 3)]
    bound = ops.bind((packed[0], None, packed[1]))
    assert bound[1] is None
    given, kept = (
        [tensor for one in all_of for tensor in one.memory.values()] for all_of in (packed, (bound[0], bound[2]))
    )
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    ends = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in kept]
    assert ends[0][0] % (2 << 20) == 0
    assert all(0 <= begin - end < 64 for (_, end), (begin, _) in pairwise(ends))


def test_what_does_not_fit_is_refused() -> None:
    kernels, given = kernel_set(VARIANTS[0]), operands(64, 32, 2)
    ops, weight = kernels.adapted, kernels.pack_linear(given.weight, None)
    assert ops is not None
    packed = ops.pack(low_rank(64, 32, ((0, 64, 4),), 0, gate_up=False))
    other = ops.pack(low_rank(64, 33, ((0, 64, 4),), 0, gate_up=False))
    for slots, matrix in (([0, 1], packed), ([0, -2], packed), ([0], packed), ([0, 0], other)):
        addend = Addend(slots=torch.tensor(slots, dtype=torch.int32), matrices=(matrix,))
        with pytest.raises(ValueError, match=r"slots must|does not fit"):
            ops.norm_linear(given.x, None, weight, addend)
