"""What a product of bf16 tiles is to the last bit, from the description of its order alone, in exact arithmetic.

The order is what was found on Sapphire Rapids with tens of thousands of random results. Results of that machine were
not kept, so these are computed. Promises: nothing here was taken from the kernels or from their emulation.
Must not know: either of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction

DEPTH = 16  # pairs of one instruction
_LEAST, _BITS, _END = Fraction(1, 2**126), 24, Fraction(2**128)


def bf16(bits: int) -> float:
    """The number of a bf16's pattern; denormals count as zeros."""
    (value,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    return value if not 0 < abs(value) < _LEAST else math.copysign(0.0, value)


def tile_sum(activations: Sequence[float], weights: Sequence[float]) -> float:
    """Of one row and one lane, over whole instructions."""
    total = 0.0
    for first in range(0, len(activations), 2 * DEPTH):
        even = odd = 0.0
        for at in range(first, first + 2 * DEPTH, 2):
            even = _fused(activations[at], weights[at], even)
            odd = _fused(activations[at + 1], weights[at + 1], odd)
        total = _fused(1.0, _fused(1.0, even, odd), total)
    return total


def _fused(a: float, b: float, c: float) -> float:
    """a * b + c rounded once to 24 bits; what is still smaller than a normal number then is zero."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # exact as well, and has the right sign
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - _BITS + 1)
    magnitude = round(magnitude / unit) * unit  # ties to even
    rounded = 0.0 if magnitude < _LEAST else math.inf if magnitude >= _END else float(magnitude)
    return math.copysign(rounded, exact)
