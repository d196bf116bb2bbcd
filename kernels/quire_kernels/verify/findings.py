"""The result of one check of one op, and the comparison of a tensor with its expected value.

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
    """A kernel set and the configuration it was made for."""

    kernels: KernelSet
    device: torch.device
    dtype: torch.dtype
    quantization: Quantization | None = None
    kv_type: KVType = "auto"
    alone: bool = False  # the set promises that a row has the same bits alone and in any batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a comparison."""

    share: float = 0.0  # the greatest error as a share of its tolerance; 0: all equal
    alone: bool | None = None  # whether rows computed alone had the same bits; None: not compared
    problem: str = ""  # one line; empty if the result is right


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One op in one case. Only `run` may fail or hang."""

    op: str
    case: str
    run: Callable[[], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The reported result of a check."""

    op: str
    case: str
    ok: bool
    share: float = 0.0
    alone: bool | None = None
    problem: str = ""
    fatal: bool = False  # no further check is possible on this device or in this process


def close(found: Tensor, truth: Tensor, bound: Tensor) -> Outcome:
    """Check every element against its bound; `bound` may be broadcast. Computed on the CPU in float64."""
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
    """Check bitwise equality."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return Outcome(problem=f"{what}: {found.dtype} {list(found.shape)}, not {wanted.dtype} {list(wanted.shape)}")
    differ = int((bits(found) != bits(wanted)).sum())
    return Outcome(problem=f"{what}: {differ:,} of {found.numel():,} differ" if differ else "")


def bits(x: Tensor) -> Tensor:
    """The numbers as integers, so that NaN equals itself and +0 differs from -0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().cpu().view(kinds[x.element_size()])


def compared_alone(equal: bool, subject: Subject, what: str) -> Outcome:
    """Record whether rows alone had the same bits; a difference is a problem if the subject promises equality."""
    problem = f"{what} has other bits alone than in the batch" if subject.alone and not equal else ""
    return Outcome(alone=equal, problem=problem)


def together(*outcomes: Outcome) -> Outcome:
    """The first problem, the greatest share, and whether all rows compared alone were equal."""
    alone = [outcome.alone for outcome in outcomes if outcome.alone is not None]
    return Outcome(
        share=max((outcome.share for outcome in outcomes), default=0.0),
        alone=all(alone) if alone else None,
        problem=next((outcome.problem for outcome in outcomes if outcome.problem), ""),
    )
