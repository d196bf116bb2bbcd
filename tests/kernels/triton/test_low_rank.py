"""What adapters add: their definition, rows bit for bit, rows without an adapter untouched, and nothing beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire_kernels.adapter_places import AdapterPlaces
from quire_kernels.kernel_set import Addend, Norm
from quire_kernels.low_rank import AdaptedProduct, LowRankMatrix, LowRankPart
from quire_kernels.reference.linear import Linear
from quire_kernels.triton import low_rank
from quire_kernels.triton.set import make_triton_set
from support.guarded import DEVICE, between_guards, guarded
from support.planted import noticed, planted

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
# K, N, and the first row and the rank of each part: one part, two and three; whole tiles and remainders.
SHAPES = ((128, 64, ((0, 16),)), (200, 72, ((0, 5), (36, 9))), (1075, 300, ((0, 3), (200, 20), (250, 1))))
ROWS = 37
PLACES = 3


def product_of(depth: int, columns: int, parts: Sequence[tuple[int, int]]) -> AdaptedProduct:
    return AdaptedProduct(num_rows=columns, num_inputs=depth, starts=tuple(start for start, _ in parts))


def adapter(depth: int, columns: int, parts: Sequence[tuple[int, int]], seed: int, dtype: torch.dtype) -> LowRankMatrix:
    random, ends = torch.Generator().manual_seed(seed), [*(start for start, _ in parts[1:]), columns]
    made = [
        LowRankPart(
            first_row=start,
            shrink=(torch.randn(rank, depth, generator=random) / depth**0.5).to(dtype),
            expand=torch.randn(end - start, rank, generator=random).to(dtype),
            scale=0.5 + seed,
        )
        for (start, rank), end in zip(parts, ends, strict=True)
    ]
    return LowRankMatrix(num_rows=columns, num_inputs=depth, gate_up=False, parts=tuple(made))


def placed(depth: int, columns: int, parts: Sequence[tuple[int, int]], dtype: torch.dtype) -> AdapterPlaces:
    """Adapters in all places but the last."""
    places = AdapterPlaces([product_of(depth, columns, parts)], PLACES, 20, dtype, DEVICE)
    for index in range(PLACES - 1):
        host = torch.full((len(places.place(0)),), 0x5A, dtype=torch.uint8)
        places.fill(host, {0: adapter(depth, columns, parts, index, dtype)})
        places.place(index).copy_(host)
    return places


def operands(depth: int, columns: int, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(depth)
    x, out = (torch.randn(rows, width, generator=random).to(dtype) for width in (depth, columns))
    slots = torch.randint(-1, PLACES, (rows,), generator=random, dtype=torch.int32)
    return between_guards(x), between_guards(out), between_guards(slots)


def check(module, shape, dtype: torch.dtype = torch.bfloat16) -> None:
    """Against the definition in float64."""
    depth, columns, parts = shape
    places, (x, out, slots) = placed(depth, columns, parts, dtype), operands(depth, columns, dtype)
    before = out.clone()
    with guarded():
        found = module.add_adapted(out, x, Addend(slots=slots, matrices=(places[0],)), 0.5)
    assert found is out
    for row, slot in enumerate(slots.tolist()):
        wanted = before[row].double()
        if not 0 <= slot < PLACES - 1:
            assert torch.equal(found[row], before[row]), "a row without an adapter, or of one that adds nothing"
            continue
        for part in adapter(depth, columns, parts, slot, dtype).parts:
            added = part.expand.double() @ (part.shrink.double() @ x[row].double().cpu()) * part.scale
            wanted[part.first_row : part.first_row + len(added)] += 0.5 * added.to(DEVICE)
        error = (found[row].double() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE[dtype], (row, error)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_added_is_its_definition(shape, dtype):
    check(low_rank, shape, dtype)


def test_a_row_has_the_bits_that_it_has_alone():
    """In any place of a tile, among any others."""
    depth, columns, parts = SHAPES[2]
    places, (x, out, slots) = placed(depth, columns, parts, torch.bfloat16), operands(depth, columns, torch.bfloat16)

    def added(rows: Tensor) -> Tensor:
        addend = Addend(slots=slots[rows].contiguous(), matrices=(places[0],))
        return low_rank.add_adapted(out[rows].contiguous(), x[rows].contiguous(), addend)

    whole = added(torch.arange(ROWS, device=DEVICE))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for count in (1, 2, 17, ROWS):
        assert torch.equal(added(order[:count]), whole[order[:count]]), f"{count} rows"
    for row in range(5):
        assert torch.equal(added(torch.tensor([row], device=DEVICE)), whole[row : row + 1]), row


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_product_has_what_is_added(deterministic):
    """Base rows have the bits of the plain op where an op's bits do not depend on the rows; others are near theirs."""
    kernels = make_triton_set(deterministic=deterministic)
    ops, depth, inner, dtype = kernels.adapted, 64, 48, torch.bfloat16
    parts = ((0, 4), (inner, 7))
    places, (x, _, slots) = placed(depth, 2 * inner, parts, dtype), operands(depth, 2 * inner, dtype)
    random = torch.Generator().manual_seed(4)
    weight = (torch.randn(2 * inner, depth, generator=random) / 8).to(dtype).to(DEVICE)
    residual = torch.randn(ROWS, 2 * inner, generator=random).to(dtype).to(DEVICE)
    norm, w = Norm(torch.ones(depth, dtype=dtype, device=DEVICE), 1e-5), Linear(weight, None)
    addend = Addend(slots=slots, matrices=(places[0],))
    deltas = torch.zeros(PLACES, 2 * inner, depth, dtype=torch.float64)
    for slot in range(PLACES - 1):
        for part in adapter(depth, 2 * inner, parts, slot, dtype).parts:
            rows = slice(part.first_row, part.first_row + len(part.expand))
            deltas[slot, rows] = part.scale * part.expand.double() @ part.shrink.double()
    deltas = deltas.to(DEVICE)
    found = {
        "norm_linear": (ops.norm_linear(x, norm, w, addend), kernels.norm_linear(x, norm, w)),
        "norm_gate_up": (ops.norm_gate_up(x, norm, w, "silu", addend), kernels.norm_gate_up(x, norm, w, "silu")),
        "linear_add": (
            ops.linear_add(x, w, residual.clone(), 0.5, addend),
            kernels.linear_add(x, w, residual.clone(), 0.5),
        ),
    }
    base = slots < 0
    for name, (adapted, plain) in found.items():
        assert torch.equal(adapted[base], plain[base]), name
        for slot in range(PLACES):
            merged = Linear((weight.double() + deltas[slot]).float().to(dtype), None)
            wanted = {
                "norm_linear": lambda m: kernels.norm_linear(x, norm, m),
                "norm_gate_up": lambda m: kernels.norm_gate_up(x, norm, m, "silu"),
                "linear_add": lambda m: kernels.linear_add(x, m, residual.clone(), 0.5),
            }[name](merged)
            rows = slots == slot
            error = (adapted[rows].float() - wanted[rows].float()).norm() / wanted[rows].float().norm()
            assert error < 0.02, (name, slot, error)


def test_what_does_not_fit_is_refused():
    depth, columns, parts = SHAPES[0]
    places, (x, out, slots) = placed(depth, columns, parts, torch.bfloat16), operands(depth, columns, torch.bfloat16)
    for changed in (
        {"x": x[:, :100].contiguous()},
        {"out": out[:5]},
        {"slots": slots.long()},
        {"x": x.half(), "out": out.half()},
    ):
        given = {"x": x, "out": out, "slots": slots} | changed
        with pytest.raises(ValueError, match=r"do not fit|must be contiguous int32"):
            low_rank.add_adapted(given["out"], given["x"], Addend(slots=given["slots"], matrices=(places[0],)))
    wide = adapter(depth, columns, ((0, 40),), 0, torch.bfloat16)
    with pytest.raises(ValueError, match="does not fit the product at site 0"):
        places.fill(torch.empty(len(places.place(0)), dtype=torch.uint8), {0: wide})
    other = adapter(depth, columns + 1, ((0, 4),), 0, torch.bfloat16)
    with pytest.raises(ValueError, match="does not fit the product at site 0"):
        places.fill(torch.empty(len(places.place(0)), dtype=torch.uint8), {0: other})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("h += tl.load", "h = tl.load"),  # of the last span alone
        ("place.to(tl.int64) * place_stride + columns", "columns"),
        ("end = tl.where(part == 0, second,", "end = tl.where(part == 0, num_columns,"),
    ],
)
def test_a_planted_bug_is_found(old, new, tmp_path):
    module = planted(low_rank, old, new, tmp_path)
    with pytest.raises(noticed()):
        check(module, SHAPES[2])
