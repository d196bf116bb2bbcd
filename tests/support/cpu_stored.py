"""Matrices in the forms that others store, with random numbers: every kind, every form of scales and offsets.

Promises: the same matrices for the same sizes. Must not know: how the kernels pack or compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_kernels.stored import UNIT_COLUMNS, StoredMatrix

PLAIN = tuple(float(i) for i in range(16))
CENTRED = tuple(float(i - 8) for i in range(16))
E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0))
IQ4 = (-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
Make = Callable[[int, int, torch.Generator], StoredMatrix]


def _integers(low: int, high: int, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=generator)


def _form(  # noqa: PLR0917 - a table of forms
    kind: str, group: int, scales: str, offsets: str = "none", table: tuple[float, ...] = (), size: float = 8.0
) -> Make:
    """`scales`, `offsets`: a type of floats, "units", and of offsets also "points" or "equal points"."""
    types = {"half": torch.float16, "bf16": torch.bfloat16, "float": torch.float32}

    def make(n: int, k: int, generator: torch.Generator) -> StoredMatrix:
        columns = k if group < 0 else group
        groups, spans = (n, -(-k // columns)), (n, -(-k // UNIT_COLUMNS))
        step = 1 / (size * k**0.5)

        def numbers(shape: tuple[int, int], low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(shape, generator=generator)

        if kind == "nibbles":
            codes = _integers(0, 15, (n, k), generator).to(torch.uint8)
        elif kind == "six_bits":
            codes = _integers(-32, 31, (n, k), generator).to(torch.int8).view(torch.uint8)
        elif kind == "bytes":
            codes = _integers(0, 255, (n, k), generator).to(torch.uint8)
        else:  # without NaN
            codes = (_integers(0, 0x7E, (n, k), generator) + 128 * _integers(0, 1, (n, k), generator)).to(torch.uint8)
        parts: dict[str, Tensor] = {}
        if scales == "units":
            parts["scales"] = _integers(1, 63, groups, generator).to(torch.int8)
            parts["scale_units"] = (step * numbers(spans, 0.5, 1.5) / 32).half()
        else:
            parts["scales"] = (step * numbers(groups, 0.5, 1.5)).to(types[scales])
        if offsets == "units":
            parts["offsets"] = _integers(0, 63, groups, generator).to(torch.int8)
            parts["offset_units"] = (-step * numbers(spans, 0.5, 1.5) / 8).half()
        elif offsets == "points":
            parts["zero_points"] = _integers(0, 15, groups, generator).to(torch.int8)
        elif offsets == "equal points":
            parts["zero_points"] = torch.full(groups, 8, dtype=torch.int8)
        elif offsets != "none":
            parts["offsets"] = (size * step * numbers(groups, -1, 1)).to(types[offsets])
        return StoredMatrix(kind=kind, codes=codes, group_size=columns, table=table, **parts)

    return make


FORMS: dict[str, Make] = {
    "awq": _form("nibbles", 128, "half", "points", PLAIN),
    "gptq": _form("nibbles", 64, "half", "equal points", PLAIN),
    "w4a16": _form("nibbles", 32, "bf16", "none", CENTRED),
    "w4a16 by row": _form("nibbles", -1, "float", "none", CENTRED),
    "q4_1": _form("nibbles", 32, "half", "half", PLAIN),
    "q4_k": _form("nibbles", 32, "units", "units", PLAIN),
    "iq4_xs": _form("nibbles", 32, "units", "none", IQ4, 80.0),
    "q2_k": _form("nibbles", 16, "units", "units", PLAIN),
    "nvfp4": _form("nibbles", 16, "float", "none", E2M1),
    "q8_0": _form("bytes", 32, "half", "none", (), 80.0),
    "w8a16": _form("bytes", 128, "bf16", "points", (), 80.0),
    "w8a16 by row": _form("bytes", -1, "float", "float", (), 80.0),
    "q6_k": _form("bytes", 16, "units", "none", (), 80.0),
    "fp8": _form("e4m3", 128, "float", "none", (), 100.0),
    "fp8 by row": _form("e4m3", -1, "float", "none", (), 100.0),
    "six bits": _form("six_bits", 16, "units", "none", (), 20.0),
    "six bits with offsets": _form("six_bits", 32, "units", "units", (), 20.0),
}


def stored_matrix(name: str, n: int, k: int, seed: int = 0) -> StoredMatrix:
    return FORMS[name](n, k, torch.Generator().manual_seed(hash((list(FORMS).index(name), n, k, seed))))
