"""Rates and names of the CPU instructions that the kernels use, from the compiled kernels' probe.

Promises: rates over wall time of all workers of a context; 0 and no name where the CPU has no instruction of that kind.
Must not know: tensors.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_double
from dataclasses import dataclass

KINDS = ("fp32", "bf16", "int8")  # in the order of `Kind` in probe.cpp
_ROUNDS = 5
_SECONDS = 0.001  # per kind and round: long enough for a clock, short against most disturbances


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRates:
    """Operations per second of one core; a multiply and an add are two."""

    fp32: float
    bf16: float


def rate(library: ctypes.CDLL, context: int, kind: str, seconds: float) -> float:
    """Operations per second of all workers of the context together."""
    result = c_double()
    library.quire_probe_arithmetic(context, KINDS.index(kind), seconds, byref(result))
    return result.value


def instruction(library: ctypes.CDLL, kind: str) -> str:
    """The instruction's name in the CPU's manual."""
    name: bytes = library.quire_probe_instruction(KINDS.index(kind))
    return name.decode()


def core_rates(library: ctypes.CDLL) -> CoreRates:
    """The best of several short rounds, in turns, so that an interruption affects neither kind."""
    context = library.quire_create(1, None)
    if not context:
        raise MemoryError("starting a worker to measure with")
    try:
        rounds = [[rate(library, context, kind, _SECONDS) for kind in ("fp32", "bf16")] for _ in range(_ROUNDS)]
    finally:
        library.quire_destroy(context)
    fp32, bf16 = map(max, zip(*rounds, strict=True))
    return CoreRates(fp32=fp32, bf16=bf16)
