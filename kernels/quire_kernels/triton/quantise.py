"""Matrices of a model's own type as int8 or int4, for products that decode them.

Promises: int8's codes and scales are those of the C++ kernels: one scale for a row, which maps its largest magnitude to
127. So are int4's: groups of 32, and of the sixteen scales that are tried for one that with the least squared error, in
a byte relative to a power of two for the row. Only where two errors are equal but for the order of their sums another
scale may be chosen. Rows of a product are not quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_kernels.kernel_set import Quantization
from quire_kernels.reference.linear import Linear
from quire_kernels.stored import StoredMatrix
from quire_kernels.triton.stored_product import StoredLinear, pack_stored

BITS: dict[Quantization, float] = {"int8": 8.0, "int4": 4.5}  # of a value, without the scales of int8's rows
_GROUP, _LARGEST = 32, 127.0
# What the extreme value of a group is mapped to by the scales that are tried; the first one is the usual choice.
_EXTREMES = (-8.0, -7.8, -7.6, -7.4, -7.2, -7.0, -6.8, -6.5, -8.2, -8.4, -8.6, -8.8, -9.0, -9.3, -9.6, -10.0)
_LEAST_MAPPED, _LEAST_VALUE = 6.5, 1e-35  # the inverse of the least value's unit is a number
_NIBBLES = tuple(float(value) for value in range(-8, 8))
# A scale's byte as a float's bits: sign, three bits of exponent, four of mantissa; from 2^-7 to 1.9375.
_SHIFT, _LEAST_BITS, _LARGEST_BITS = 19, 0x3C000000, 0x3FF80000
_VALUES_AT_ONCE = 1 << 21


def pack_linear(weight: Tensor, bias: Tensor | None, quantization: Quantization) -> StoredLinear:
    """[N, K] and [N]."""
    return _packed([weight], bias, quantization)


def pack_gate_up(gate: Tensor, up: Tensor, bias: Tensor | None, quantization: Quantization) -> StoredLinear:
    """[I, K] twice and [2 I]: the gate's rows, then up's."""
    return _packed([gate, up], bias, quantization)


def packed_bytes(weight: Linear | StoredLinear) -> int:
    """Memory of one matrix."""
    return sum(part.nbytes for part in weight if isinstance(part, Tensor))


def _packed(weights: list[Tensor], bias: Tensor | None, quantization: Quantization) -> StoredLinear:
    found = pack_stored([[quantised(weight, quantization)] for weight in weights], bias)
    assert found is not None
    return found


def quantised(weight: Tensor, quantization: Quantization) -> StoredMatrix:
    """A matrix [N, K] as codes and scales, on its device. NaN where a row is not finite."""
    step = max(1, _VALUES_AT_ONCE // (weight.shape[1] * (len(_EXTREMES) if quantization == "int4" else 1)))
    parts = [_rows(weight[start : start + step].float(), quantization) for start in range(0, len(weight), step)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    if quantization == "int8":
        return StoredMatrix(kind="bytes", codes=codes, group_size=weight.shape[1], scales=scales)
    return StoredMatrix(kind="nibbles", codes=codes, group_size=_GROUP, scales=scales, table=_NIBBLES)


def _rows(x: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Codes [R, K] uint8 and scales [R, G] float32 of rows in float32."""
    return _in_bytes(x) if quantization == "int8" else _in_nibbles(x)


def _in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    most = x.abs().amax(dim=1, keepdim=True)
    limit = torch.full_like(most, _LARGEST)  # a tensor: torch divides by a number in another way
    inverse = torch.where(most > 0, limit / most, 0.0)
    codes = torch.round(x * inverse).clamp(-_LARGEST, _LARGEST).nan_to_num(nan=0.0)
    return codes.to(torch.int8).view(torch.uint8), most / limit


def _in_nibbles(x: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, columns = x.shape
    largest = x.abs().amax(dim=1)
    exponent = torch.frexp(largest.clamp(min=_LEAST_VALUE) / _LEAST_MAPPED)[1] - 1
    unit = torch.ldexp(torch.ones_like(largest), exponent)[:, None]
    groups = torch.nn.functional.pad(x / unit, (0, -columns % _GROUP)).view(num_rows, -1, _GROUP)
    magnitudes = groups.abs()
    at_most = magnitudes == magnitudes.amax(dim=2, keepdim=True)
    places = torch.arange(_GROUP, device=x.device)
    first = torch.where(at_most, places, _GROUP - 1).amin(dim=2, keepdim=True)  # of equals the first
    tried = groups.gather(2, first) / torch.tensor(_EXTREMES, device=x.device)  # [R, G, 16]
    scales = _told_in_a_byte(tried)
    inverses = torch.ones_like(scales) / scales
    codes = torch.round(groups[..., None, :] * inverses[..., None]).clamp(-8, 7)  # [R, G, 16, 32]
    errors = (groups[..., None, :] - codes * scales[..., None]).double().square().sum(dim=3)
    best = torch.where(errors == errors.amin(dim=2, keepdim=True), torch.arange(len(_EXTREMES), device=x.device), 99)
    best = best.amin(dim=2, keepdim=True).clamp(max=len(_EXTREMES) - 1)  # of NaN any
    chosen = scales.gather(2, best).squeeze(2) * unit
    inverse = (torch.ones_like(chosen) / chosen)[..., None]
    codes = torch.round(groups * unit[..., None] * inverse).clamp(-8, 7).nan_to_num(nan=0.0) + 8
    finite = torch.isfinite(largest)[:, None]
    return codes.to(torch.uint8).flatten(1)[:, :columns], torch.where(finite, chosen, torch.nan)


def _told_in_a_byte(scales: Tensor) -> Tensor:
    """The nearest scales that a byte tells; ties to even."""
    bits = scales.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + (1 << (_SHIFT - 1)) - 1 + (magnitude >> _SHIFT & 1)
    bounded = rounded.clamp(_LEAST_BITS, _LARGEST_BITS) & 0x7FF80000
    return torch.where(bits < 0, -bounded.view(torch.float32), bounded.view(torch.float32))
