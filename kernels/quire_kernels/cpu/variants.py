"""The instruction sets of the compiled C++ kernels, and the ones that this CPU supports.

Promises: a variant is usable only if CPU and operating system support every instruction it may contain, and the system
lets this process use every register.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ARCH_PRCTL = 158  # the system call's number on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@cache
def tile_refusal() -> str | None:
    """Why the tile registers must not be used here; None: they may."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return "only Linux on x86-64 has them"
    libc = ctypes.CDLL(None, use_errno=True)
    asked = (ctypes.c_long(number) for number in (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    if libc.syscall(*asked) == 0:
        return None
    # EINVAL: a kernel before 5.16, or no such registers; ENOSPC: a thread's stack for signals has no room for them.
    return f"the kernel refuses the tile registers ({os.strerror(ctypes.get_errno())})"


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compile the kernels."""

    name: str
    machines: tuple[str, ...]  # by the names of platform.machine(); empty: any
    features: frozenset[str]  # by the names of /proc/cpuinfo
    flags: tuple[str, ...]


_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")
_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_AMX = (*_BF16, "amx_tile", "amx_bf16", "amx_int8")


def flag_for(feature: str) -> str:
    """The compiler flag for a feature of an x86 CPU."""
    return "-m" + feature.replace("_", "-" if feature.startswith("amx") else "")


def _x86(name: str, features: tuple[str, ...]) -> Variant:
    return Variant(name=name, machines=_X86, features=frozenset(features), flags=tuple(map(flag_for, features)))


# Best first. The last one needs nothing.
VARIANTS = (
    _x86("amx", _AMX),
    _x86("avx512_bf16", _BF16),
    _x86("avx512_vnni", _VNNI),
    _x86("avx512", _AVX512),
    _x86("avx2_vnni", (*_AVX2, "avx_vnni")),
    _x86("avx2", _AVX2),
    Variant(
        name="neon_bf16", machines=_ARM, features=frozenset({"bf16", "i8mm"}), flags=("-march=armv8.2-a+bf16+i8mm",)
    ),
    Variant(name="portable", machines=(), features=frozenset(), flags=()),
)


@cache
def cpu_features() -> frozenset[str]:
    """The features of the CPU that the operating system has enabled; empty where /proc/cpuinfo does not tell."""
    return frozenset(_told("flags", "Features").split())  # on x86, on ARM


@cache
def cpu_vendor() -> str:
    """The CPU's maker by the name that CPUID gives it, such as GenuineIntel; empty on ARM, which has no such name."""
    return _told("vendor_id")


def _told(*names: str) -> str:
    """The value of the first line of /proc/cpuinfo with one of these names; empty: there is no such line."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def compilable_variants(machine: str | None = None) -> tuple[Variant, ...]:
    """The variants for machines of this architecture, or of another one by its name."""
    machine = machine or platform.machine()
    return tuple(variant for variant in VARIANTS if not variant.machines or machine in variant.machines)


def usable_variants() -> tuple[Variant, ...]:
    """The variants that run here, best first."""
    return tuple(
        variant for variant in compilable_variants() if variant.features <= cpu_features() and refusal(variant) is None
    )


def refusal(variant: Variant) -> str | None:
    """Why this process may not run a variant that the CPU supports, or None."""
    if "amx_tile" not in variant.features:
        return None
    reason = tile_refusal()
    if reason is not None:
        _tell(f"the kernels for {variant.name} are not used: {reason}")
    return reason


@cache  # once a process
def _tell(text: str) -> None:
    _log.warning("%s", text)
