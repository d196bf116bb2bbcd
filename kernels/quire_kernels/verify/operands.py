"""Operands for the checks: normal numbers, and numbers that are exact in every format of weights, rows and pools.

Promises: the same numbers on every machine.

Exact rows, weights, keys and values are small integers times a power of two, and each group that shares a scale (a row;
32 weights of int4) contains the extreme value that determines the scale. So quantization loses nothing, and the error
of a quantized op comes from its sums and from rounding the result only.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from quire_kernels.kernel_set import Quantization

Numbers = Literal["exact", "normal"]
_GROUP = 32  # weights of int4 that share a scale
_INT8, _INT4 = 127, 8
_E4M3_LARGEST = 448.0


class Source:
    """A generator of numbers on the CPU."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._generator)

    def integers(self, low: int, high: int, *sizes: int) -> Tensor:
        """Integers as float32, both bounds included."""
        return torch.randint(low, high + 1, sizes, generator=self._generator).float()

    def signs(self, *sizes: int) -> Tensor:
        return self.integers(0, 1, *sizes) * 2 - 1

    def powers(self, low: int, high: int, *sizes: int) -> Tensor:
        return torch.exp2(self.integers(low, high, *sizes))

    def bytes(self, *sizes: int) -> Tensor:
        """[..., K] signed bytes; each row contains one of the largest magnitude."""
        found = self.integers(-_INT8, _INT8, *sizes)
        at = torch.randint(sizes[-1], (*sizes[:-1], 1), generator=self._generator)
        return found.scatter(-1, at, _INT8 * self.signs(*sizes[:-1], 1))

    def weights(self, num_outputs: int, num_inputs: int, quantization: Quantization | None) -> Tensor:
        """[N, K] exact weights, scaled so that a product has about the magnitude of its operand."""
        if quantization == "int4":
            found = self.integers(-_INT4, _INT4 - 1, num_outputs, num_inputs)
            found[:, ::_GROUP] = -_INT4
        else:
            found = self.bytes(num_outputs, num_inputs)
        size = math.sqrt(num_inputs) * float(found.square().mean().sqrt())
        return found * self.powers(-1, 0, num_outputs, 1) * 2.0 ** -round(math.log2(size))

    def e4m3(self, *sizes: int) -> Tensor:
        """[..., K] numbers of the format e4m3; each row contains one of the largest magnitude."""
        # 0x7f and 0xff are NaN.
        codes = self.integers(0, 0x7E, *sizes).to(torch.uint8)
        found = codes.view(torch.float8_e4m3fn).float() * self.signs(*sizes)
        at = torch.randint(sizes[-1], (*sizes[:-1], 1), generator=self._generator)
        return found.scatter(-1, at, _E4M3_LARGEST * self.signs(*sizes[:-1], 1))

    def stored(self, kv_type: str, *sizes: int) -> Tensor:
        """[..., K] numbers of magnitude about 1 that a pool of this type stores exactly."""
        if kv_type == "fp8":
            return self.e4m3(*sizes) * 2.0**-7
        return self.bytes(*sizes) * 2.0**-6


def usual_angles(length: int, width: int) -> Tensor:
    """[P, D] cosines, then sines, of the usual RoPE frequencies."""
    angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def quarter_turns(length: int, width: int) -> Tensor:
    """[P, D] cosines and sines of multiples of 90 degrees, different by position and pair, which rotate exactly."""
    turns = (torch.arange(length)[:, None] + torch.arange(width // 2)) % 4
    cosines, sines = torch.tensor([1.0, 0.0, -1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, -1.0])
    return torch.cat([cosines[turns], sines[turns]], dim=1)
