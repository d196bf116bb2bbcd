"""The activations once more, by torch's own functions, for tests of whatever computes them.

Promises: one that has no row here fails every test that goes through `Activation`. Must not know: the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.activations import Activation


class Expected(NamedTuple):
    """An activation in float64, with a bound of its derivative."""

    activate: Callable[[Tensor], Tensor]
    steepest: float
    factor: Callable[[Tensor], Tensor] = torch.clone

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activate(gate) * self.factor(up)


def _swiglu(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=7)
    return gate * torch.sigmoid(1.702 * gate)


EXPECTED: dict[Activation, Expected] = {
    "silu": Expected(lambda gate: gate * torch.sigmoid(gate), 1.1),
    "gelu_tanh": Expected(lambda gate: F.gelu(gate, approximate="tanh"), 1.13),
    "swiglu_clamped": Expected(_swiglu, 1.1, lambda up: up.clamp(-7, 7) + 1),
}
