"""What one check of one op came to, and how a result is compared with what it should be.

Promises: NaN is never close to anything; a comparison never raises for a wrong result, only for a wrong check. Must not
know: the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.kernel_set import KernelSet, KVType, Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A kernel set and what it was made for."""

    kernels: KernelSet
    device: torch.device
    dtype: torch.dtype
    quantization: Quantization | None = None
    kv_type: KVType = "auto"
    alone: bool = False  # it promises that a row alone has the bits that it has in any batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was compared."""

    share: float = 0.0  # the greatest error as a share of its tolerance; 0: all equal
    alone: bool | None = None  # whether rows computed alone had the same bits; None: not compared
    problem: str = ""  # one line; nothing where all is well


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One op in one case. All that may fail or hang happens in `run`."""

    op: str
    case: str
    run: Callable[[], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of a check."""

    op: str
    case: str
    ok: bool
    share: float = 0.0
    alone: bool | None = None
    problem: str = ""
    fatal: bool = False  # the device or the process cannot go on


def close(found: Tensor, truth: Tensor, bound: Tensor) -> Outcome:
    """Every element within its bound; `bound` may be broadcast. Computed on the CPU in float64."""
    if found.shape != truth.shape:
        return Outcome(problem=f"the shape is {list(found.shape)}, not {list(truth.shape)}")
    if not found.numel():
        return Outcome()
    error = (found.detach().cpu().double() - truth.double()).abs()
    bound = bound.double().expand_as(error)
    shares = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=torch.inf)
    at = int(shares.argmax())
    share = float(shares.flatten()[at])
    if share <= 1:
        return Outcome(share=share)
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), shares.shape)]
    wrong = int((shares > 1).sum())
    return Outcome(
        share=share,
        problem=(
            f"{wrong:,} of {shares.numel():,} numbers are wrong; at {place} it is"
            f" {float(found.detach().cpu().flatten()[at]):.6g}, not {float(truth.flatten()[at]):.6g}"
            f" within {float(bound.flatten()[at]):.2g}"
        ),
    )


def same(found: Tensor, wanted: Tensor, what: str) -> Outcome:
    """Bitwise equality."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return Outcome(problem=f"{what}: {found.dtype} {list(found.shape)}, not {wanted.dtype} {list(wanted.shape)}")
    differ = int((bits(found) != bits(wanted)).sum())
    return Outcome(problem=f"{what}: {differ:,} of {found.numel():,} differ" if differ else "")


def bits(x: Tensor) -> Tensor:
    """The numbers as integers, so that NaN equals itself and the zeros differ."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().cpu().view(kinds[x.element_size()])


def compared_alone(equal: bool, subject: Subject, what: str) -> Outcome:
    """Whether rows alone had the same bits: a fault where that was promised, else information."""
    problem = f"{what} has other bits alone than in the batch" if subject.alone and not equal else ""
    return Outcome(alone=equal, problem=problem)


def together(*outcomes: Outcome) -> Outcome:
    """The first problem, the greatest share, and whether all that were compared alone were equal."""
    alone = [outcome.alone for outcome in outcomes if outcome.alone is not None]
    return Outcome(
        share=max((outcome.share for outcome in outcomes), default=0.0),
        alone=all(alone) if alone else None,
        problem=next((outcome.problem for outcome in outcomes if outcome.problem), ""),
    )
