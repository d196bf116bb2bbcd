"""What adapters add to experts: exact up to rounding, and a row's bits alone whatever the other rows are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire_kernels.cpu.variants import usable_variants
from quire_kernels.kernel_set import Addend, KernelSet, Norm
from quire_kernels.low_rank import LowRankExperts, LowRankPart
from quire_kernels.reference import REFERENCE
from support.cpu_linear import EPS, KINDS, kernel_set
from support.experts import Block, packed, random_block

VARIANTS = [variant.name for variant in usable_variants()]
# Sizes that fill panels and such that do not: experts, hidden, inner, experts of a row.
SHAPES = ((16, 128, 64, 4), (5, 100, 40, 2), (3, 96, 160, 3))
ADAPTERS = 4  # the third one adds to down alone, the last one nothing
ROWS = 61


def parts_of(block: Block, seed: int) -> tuple[LowRankExperts, LowRankExperts]:
    """What an adapter adds to gate and up, each with a rank of its own, and to down."""
    (count, inner, hidden), random = block.gate.shape, torch.Generator().manual_seed(seed)

    def part(first: int, rows: int, rank: int, columns: int) -> LowRankPart:
        shrink = torch.randn(count, rank, columns, generator=random) / columns**0.5
        expand = torch.randn(count, rows, rank, generator=random)
        return LowRankPart(first_row=first, shrink=shrink.bfloat16(), expand=expand.bfloat16(), scale=0.5 + seed)

    pair = (part(0, inner, 3 + seed, hidden), part(inner, inner, 17, hidden))
    above = LowRankExperts(count=count, num_rows=2 * inner, num_inputs=hidden, gate_up=True, parts=pair)
    down = (part(0, hidden, 5, inner),)
    return above, LowRankExperts(count=count, num_rows=hidden, num_inputs=inner, gate_up=False, parts=down)


class Mixture:
    """A block of experts with adapters, for one kernel set."""

    def __init__(self, kernels: KernelSet, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16):
        count, hidden, inner, top_k = shape
        block, ops = random_block(count, hidden, inner, biases=True), kernels.adapted
        assert ops is not None
        assert ops.pack_experts is not None
        self.kernels, self.ops = kernels, ops
        wide = Block(**{name: getattr(block, name).to(dtype) for name in block.__dataclass_fields__})
        self.routing, self.experts = packed(kernels, wide, top_k=top_k)
        made = [[ops.pack_experts(each) for each in parts_of(block, seed)] for seed in range(3)]
        self.above = (made[0][0], made[1][0], None, None)
        self.below = (made[0][1], made[1][1], made[2][1], None)
        self.norm = Norm(torch.ones(hidden, dtype=dtype), EPS)

    def mix(self, x: Tensor, slots: Tensor) -> Tensor:
        above, below = (Addend(slots=slots, matrices=each) for each in (self.above, self.below))
        assert self.ops.mix_experts is not None
        return self.ops.mix_experts(x, self.norm, self.routing, self.experts, 0.5, x.clone(), above, below)

    def plain(self, x: Tensor) -> Tensor:
        assert self.kernels.mix_experts is not None
        return self.kernels.mix_experts(x, self.norm, self.routing, self.experts, 0.5, x.clone())


def rows_of(count: int, hidden: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    slots = torch.randint(-1, ADAPTERS, (count,), generator=random, dtype=torch.int32)
    return torch.randn(count, hidden, generator=random).bfloat16(), slots


@pytest.mark.parametrize("variant", [*VARIANTS, "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_added_is_right(variant: str, shape: tuple[int, int, int, int]) -> None:
    kernels = REFERENCE if variant == "reference" else kernel_set(variant)
    x, slots = rows_of(ROWS, shape[1])
    exact = Mixture(REFERENCE, shape, torch.float32)
    wanted, base = exact.mix(x.float(), slots), exact.plain(x.float())
    found = Mixture(kernels, shape).mix(x, slots).float()
    adapted = (slots >= 0) & (slots < 3)
    assert ((wanted - base).norm(dim=1) > 0.1 * base.norm(dim=1))[adapted].all()
    # Few rows choose otherwise where their numbers are rounded.
    close = (found - wanted).norm(dim=1) < 0.03 * wanted.norm(dim=1)
    assert close.float().mean() > 0.9


def test_merged_experts_give_the_same() -> None:
    """In float32, by the definition of an adapter."""
    shape, (x, slots) = SHAPES[1], rows_of(ROWS, SHAPES[1][1])
    mixture, block = Mixture(REFERENCE, shape, torch.float32), random_block(*shape[:3], biases=True)
    found = mixture.mix(x.float(), slots)
    for slot in range(2):
        above, below = parts_of(block, slot)
        delta = [part.scale * part.expand.double() @ part.shrink.double() for part in (*above.parts, *below.parts)]
        both = zip((block.gate, block.up, block.down), delta, strict=True)
        gate, up, down = ((weight.double() + added).float() for weight, added in both)
        whole = {name: getattr(block, name) for name in block.__dataclass_fields__}
        whole |= {"gate": gate, "up": up, "down": down}
        wide = Block(**{name: tensor.float() for name, tensor in whole.items()})
        routing, experts = packed(REFERENCE, wide, top_k=shape[3])
        rows = x.float()[slots == slot]
        assert REFERENCE.mix_experts is not None
        wanted = REFERENCE.mix_experts(rows, mixture.norm, routing, experts, 0.5, rows.clone())
        assert (found[slots == slot] - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def check_alone(kernels: KernelSet, shape: tuple[int, int, int, int], counts: tuple[int, ...]) -> None:
    mixture = Mixture(kernels, shape)
    x, slots = rows_of(max(counts), shape[1])
    whole, base = mixture.mix(x, slots), mixture.plain(x)
    plain = (slots < 0) | (slots == 3)
    assert torch.equal(whole[plain], base[plain])
    assert not (whole[~plain] == base[~plain]).all(dim=1).any()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    for rows in counts:
        chosen = order[:rows]
        assert torch.equal(mixture.mix(x[chosen], slots[chosen]), whole[chosen]), f"{rows} rows"
    for row in range(9):
        assert torch.equal(mixture.mix(x[row : row + 1], slots[row : row + 1]), whole[row : row + 1]), row


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_bits_that_it_has_alone(variant: str, kind) -> None:
    for shape in SHAPES:
        check_alone(kernel_set(variant, kind), shape, (2, 3, 17, 64, 150))


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_rows_have_the_bits_of_few(variant: str) -> None:
    check_alone(kernel_set(variant), SHAPES[0], (16, 100, 512))
    mixture, (x, slots) = Mixture(kernel_set(variant, threads=1), SHAPES[0]), rows_of(100, SHAPES[0][1])
    many = Mixture(kernel_set(variant, threads=3), SHAPES[0])
    assert torch.equal(mixture.mix(x, slots), many.mix(x, slots))


def test_a_row_of_the_reference_has_the_bits_that_it_has_alone() -> None:
    check_alone(REFERENCE, SHAPES[1], (2, 17, 64))


def test_what_does_not_fit_is_refused() -> None:
    mixture, other = (Mixture(kernel_set(VARIANTS[0]), shape) for shape in SHAPES[:2])
    x, slots = rows_of(3, SHAPES[0][1])
    mixture.below = other.below
    with pytest.raises(ValueError, match="does not fit the product at site 1"):
        mixture.mix(x, slots)


def test_an_adapter_that_is_told_to_another_process_is_the_same() -> None:
    kernels, shape = kernel_set(VARIANTS[0]), SHAPES[1]
    ops, block = kernels.adapted, random_block(*shape[:3])
    assert ops is not None
    assert ops.pack_experts is not None
    assert ops.told is not None
    assert ops.restored is not None
    above, below = (ops.pack_experts(each) for each in parts_of(block, 1))
    bound = ops.bind((above, None, below))
    again = ops.restored(ops.told(bound))
    assert again[1] is None
    for site in (0, 2):
        assert again[site].product == bound[site].product
        assert (again[site].args.rank, again[site].args.per_expert) == (
            bound[site].args.rank,
            bound[site].args.per_expert,
        )
        for name, tensor in bound[site].memory.items():
            assert torch.equal(again[site].memory[name], tensor), name
