"""The activations of a gate-up pair: their names and, in torch, their definitions, which every kernel set computes.

Promises: a name without a definition is a KeyError, never another activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# silu; gelu by its tanh approximation; or gpt-oss's x sigmoid(1.702 x) of a gate of at most 7, which multiplies up + 1
# with up in -7..7. In the order of the list in kernels/csrc/gemm/activations.h.
Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]

_GELU = math.sqrt(2.0 / math.pi)  # of its tanh approximation (Hendrycks & Gimpel 2016, arXiv:1606.08415)
_SWIGLU_ALPHA, _SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss


class Definition(NamedTuple):
    """The functions of a gate, and of up, whose results are multiplied. Both are float32 or wider."""

    activate: Callable[[Tensor], Tensor]
    factor: Callable[[Tensor], Tensor]
    steepest: float  # bound of the derivative of `activate`, by which `verify` bounds what an error of the gate becomes


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The activation of the gate times up, of float32 or wider."""
    definition = DEFINITIONS[activation]
    return definition.activate(gate) * definition.factor(up)


def _silu(gate: Tensor) -> Tensor:
    """Compute silu by its definition: F.silu rounds an array's last elements otherwise."""
    return gate / (1.0 + torch.exp(-gate))


def _gelu_tanh(gate: Tensor) -> Tensor:
    # 0.5 (1 + tanh(z)) is 1 / (1 + exp(-2 z))
    return gate / (1.0 + torch.exp(-2.0 * _GELU * (gate + 0.044715 * gate * gate * gate)))


def _swiglu(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=_SWIGLU_LIMIT)
    return gate / (1.0 + torch.exp(-_SWIGLU_ALPHA * gate))


def _as_it_is(up: Tensor) -> Tensor:
    return up


def _clamped_and_one(up: Tensor) -> Tensor:
    return up.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT) + 1.0


DEFINITIONS: dict[Activation, Definition] = {
    "silu": Definition(_silu, _as_it_is, 1.2),
    "gelu_tanh": Definition(_gelu_tanh, _as_it_is, 1.2),
    "swiglu_clamped": Definition(_swiglu, _clamped_and_one, 1.2),
}
