"""The instruction sets that the C++ kernels are compiled for, and which of them this CPU has.

Promises: a variant is listed as usable only if CPU and operating system support every instruction it may contain.
Must not know: compilers, files, ops.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compile the kernels."""

    name: str
    features: frozenset[str]  # as /proc/cpuinfo spells them
    flags: tuple[str, ...]


_X86 = ("x86_64", "AMD64")
_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_BF16 = (*_AVX512, "avx512_bf16", "avx512_vnni")


def _variant(name: str, features: tuple[str, ...]) -> Variant:
    flags = tuple("-m" + feature.replace("_", "") for feature in features)
    return Variant(name=name, features=frozenset(features), flags=flags)


# Best first. The last one needs nothing.
VARIANTS = (
    _variant("avx512_bf16", _BF16),
    _variant("avx512", _AVX512),
    _variant("avx2", _AVX2),
    _variant("portable", ()),
)


@cache
def cpu_features() -> frozenset[str]:
    """What the CPU offers and the operating system has enabled; empty where /proc/cpuinfo does not tell."""
    if platform.machine() not in _X86:
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def compilable_variants() -> tuple[Variant, ...]:
    """The variants for machines of this architecture."""
    return VARIANTS if platform.machine() in _X86 else VARIANTS[-1:]


def usable_variants() -> tuple[Variant, ...]:
    """The variants that run here, best first."""
    return tuple(variant for variant in VARIANTS if variant.features <= cpu_features())
