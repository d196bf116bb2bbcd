"""Conversion to and from e4m3 (no infinities, largest value 448) in integer arithmetic.

Promises: bitwise equal to torch.float8_e4m3fn for finite numbers up to 448, on any device: some GPUs have no
conversion.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = 448.0
DECODED = 256.0  # `decode_e4m3` returns a value divided by this


@triton.jit
def encode_e4m3(x):
    """float32 of at most 448 in magnitude -> uint8, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # A normal number: the exponent is rebiased from 127 to 7; rounding up carries into the kept bits.
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # A subnormal number, below 2^-6: adding 2^14 leaves multiples of 2^-9 in the last bits; the addition rounds.
    summed = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = summed.to(tl.int32, bitcast=True) - (141 << 23)
    return (tl.where(size < (121 << 23), subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """uint8 -> float16, the value divided by 256: exact, subnormals too. NaN decodes to a finite number."""
    wide = code.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
