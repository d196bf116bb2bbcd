"""What adapters add on the simulated device: the reference's results from one operation, as a launch would be.

Promises: the places of rows and the matrices in them are read from device memory when the operation is done. Its bits
are the reference's for adapters of exactly the rank that places have room for, with a part for every part of a product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_kernels.activations import Activation
from quire_kernels.adapter_places import AdapterPlaces, PlacedMatrix, place_bytes
from quire_kernels.kernel_set import AdaptedOps, Addend, Norm
from quire_kernels.low_rank import LowRankMatrix, LowRankPart, PlacedOps
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.linear import Linear


@torch.library.custom_op("quire_tests::adapted", mutates_args=())
def adapted_op(  # noqa: PLR0917 - what a launch takes
    kind: str,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: float,
    places: Tensor,
    shrink: Tensor,
    expand: Tensor,
    scales: Tensor,
    starts: list[int],
) -> Tensor:
    ops = REFERENCE.adapted
    assert ops is not None
    assert not places.numel() or -1 <= int(places.min()) <= int(places.max()) < len(shrink)
    each = [_packed(*own, starts) for own in zip(shrink, expand, scales, strict=True)]
    addend = Addend(slots=places, matrices=tuple(each))
    w, before = Linear(weight, bias), None if norm is None else Norm(norm, eps)
    if kind == "linear":
        return ops.norm_linear(x, before, w, addend)
    if kind == "add":
        assert residual is not None
        return ops.linear_add(x, w, residual.clone(), scale, addend)
    return ops.norm_gate_up(x, before, w, kind, addend)


def _packed(shrink: Tensor, expand: Tensor, scales: Tensor, starts: list[int]) -> object:
    """None where the place is empty."""
    if not bool(shrink.any()):
        return None
    ends = [*starts[1:], len(expand)]
    parts = [
        LowRankPart(first_row=start, shrink=shrink[i], expand=expand[start:end], scale=float(scales[i]))
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
        if bool(shrink[i].any())
    ]
    whole = LowRankMatrix(num_rows=len(expand), num_inputs=shrink.shape[2], gate_up=False, parts=tuple(parts))
    assert REFERENCE.adapted is not None
    return REFERENCE.adapted.pack(whole)


@adapted_op.register_fake
def _(kind, x, norm, eps, weight, *_):
    return x.new_empty(len(x), len(weight) // (1 if kind in {"linear", "add"} else 2))


def _called(kind: str, x: Tensor, norm: Norm | None, w: Linear, addend: Addend, **add: object) -> Tensor:
    matrix = addend.matrices[0]
    assert isinstance(matrix, PlacedMatrix)
    return adapted_op(
        kind,
        x,
        None if norm is None else norm.weight,
        1e-6 if norm is None else norm.eps,
        w.weight,
        w.bias,
        add.get("residual"),
        add.get("scale", 1.0),
        addend.slots,
        matrix.shrink,
        matrix.expand,
        matrix.scales,
        list(matrix.starts),
    )


def _gate_up(x: Tensor, norm: Norm | None, w: Linear, activation: Activation, addend: Addend) -> Tensor:
    return _called(activation, x, norm, w, addend)


def _linear_add(x: Tensor, w: Linear, residual: Tensor, scale: float, addend: Addend) -> Tensor:
    return _called("add", x, None, w, addend, residual=residual, scale=scale)


def _unpacked(_: object) -> int:
    raise AssertionError("adapters of a device are copied to their places")


ADAPTED = AdaptedOps(
    pack=_unpacked,
    bind=tuple,
    num_bytes=_unpacked,
    itemsize=4,
    norm_linear=lambda x, norm, w, addend: _called("linear", x, norm, w, addend),
    norm_gate_up=_gate_up,
    linear_add=_linear_add,
    placed=PlacedOps(make=AdapterPlaces, num_bytes=place_bytes, scratch=lambda products, rank, rows: rows * rank),
)
