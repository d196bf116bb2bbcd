"""Chooses the kernels' instruction set on this CPU: the fastest, measured where CPU flags mislead.

Promises: the same choice at every start on one CPU, since instruction sets round differently: a measurement is stored,
and only a clear margin overrides the order of the flags. An instruction set that is set by name serves or is refused.
Must not know: tensors.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire_kernels.cpu.compiler import CompilationError
from quire_kernels.cpu.library import OnCompiled, load_library
from quire_kernels.cpu.rates import core_rates
from quire_kernels.cpu.remembered import recalled, remembered
from quire_kernels.cpu.variants import Variant, compilable_variants, cpu_features, refusal, usable_variants

# Variants that multiply bf16 by FMA, by the variant with an instruction for it. On Intel's CPUs that instruction does
# twice the work of an FMA at less than half its rate; on AMD's at the same rate. CPU flags do not tell which.
_BY_FMA = {"avx512_bf16": "avx512_vnni"}
_MARGIN = 1.3  # FMA must be faster by this factor, since it also has to widen the weights and measurements are noisy

_log = logging.getLogger(__name__)


class UnusableVariant(ValueError):
    """The requested instruction set cannot serve here; a clause that completes "the cpu kernels", with a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The chosen kernels."""

    library: ctypes.CDLL
    variant: Variant
    why: str  # for operators, after the variant's name


def load_chosen(
    asked: str | None = None, *, cache_dir: Path | None = None, on_compiled: OnCompiled | None = None
) -> Chosen:
    """The kernels for the fastest instruction set of this CPU that the compiler supports, or for the one `asked` for.

    `cache_dir` and `on_compiled` as in `load_library`. Raises KernelBuildError, UnusableVariant.
    """

    def load(variant: Variant) -> ctypes.CDLL:
        return load_library(variant, cache_dir=cache_dir, on_compiled=on_compiled)

    if asked is not None:
        variant = usable(asked)
        return Chosen(library=load(variant), variant=variant, why="as asked for")
    candidates = usable_variants()
    refused: list[str] = []  # variants that the compiler refused
    for variant in candidates[:-1]:
        by_fma = next((each for each in candidates if each.name == _BY_FMA.get(variant.name)), None)
        try:
            if by_fma is not None:
                return _faster(variant, by_fma, load, cache_dir)
            return Chosen(library=load(variant), variant=variant, why=_by_flags(refused))
        except CompilationError as error:
            _warn(variant, error)
            refused.append(variant.name)
    return Chosen(library=load(candidates[-1]), variant=candidates[-1], why=_by_flags(refused))


def usable(name: str) -> Variant:
    """The variant with that name. Raises UnusableVariant if it does not exist, or cannot run here."""
    by_name = {variant.name: variant for variant in compilable_variants()}
    names = ", ".join(variant.name for variant in usable_variants())
    if name not in by_name:
        raise UnusableVariant(
            f"are not made for {name} on this machine (leave cpu_variant out, or set it to one of {names})"
        )
    variant = by_name[name]
    if variant not in usable_variants():
        missing = ", ".join(sorted(variant.features - cpu_features()))
        reason = f"this CPU has no {missing}" if missing else refusal(variant)
        raise UnusableVariant(
            f"cannot compute with {name}: {reason} (leave cpu_variant out, or set it to one of {names})"
        )
    return variant


def _faster(
    variant: Variant, by_fma: Variant, load: Callable[[Variant], ctypes.CDLL], cache_dir: Path | None
) -> Chosen:
    """The faster of a variant and the one that multiplies bf16 by FMA. Raises CompilationError, of the first."""
    library: ctypes.CDLL | None = None
    rates = recalled(cache_dir)
    if rates is None:
        library = load(variant)  # it has both instructions, so the other variant is compiled only if it wins
        rates = remembered(partial(core_rates, library), cache_dir)
    if rates.fp32 > _MARGIN * rates.bf16:
        try:
            why = f"bf16 by FMA, {_text(rates.fp32)} on one core; VDPBF16PS makes {_text(rates.bf16)}"
            return Chosen(library=load(by_fma), variant=by_fma, why=why)
        except CompilationError as error:
            _warn(by_fma, error)
    why = f"VDPBF16PS makes {_text(rates.bf16)} on one core, FMA {_text(rates.fp32)}"
    return Chosen(library=library or load(variant), variant=variant, why=why)


def _text(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GFLOP/s"


def _by_flags(refused: list[str]) -> str:
    if not refused:
        return "the best of this CPU's by its flags"
    return f"the best of this CPU's that the compiler knows, as it does not know {', '.join(refused)}"


def _warn(variant: Variant, error: CompilationError) -> None:
    complaint = " ".join(str(error).split("\n")[:2])
    _log.warning("cannot build the kernels for %s, using slower ones: %s", variant.name, complaint)
