"""Random blocks of experts, packed by any kernel set, and what they compute by their definition.

Must not know: models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.activations import Activation
from quire_kernels.kernel_set import ExpertMatrices, KernelSet, Routing, expert_rows
from support.activations import EXPECTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A router and E experts as plain matrices."""

    router: Tensor  # [E, H]
    router_bias: Tensor | None
    gate: Tensor  # [E, I, H]
    up: Tensor  # [E, I, H]
    down: Tensor  # [E, H, I]
    gate_bias: Tensor | None = None  # [E, I]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None  # [E, H]

    @property
    def count(self) -> int:
        return len(self.router)


def random_block(
    count: int, hidden: int, inner: int, *, biases: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Block:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    return Block(
        router=(2 * normal(count, hidden) / hidden**0.5).to(dtype),
        router_bias=normal(count).to(dtype) if biases else None,
        gate=(normal(count, inner, hidden) / hidden**0.5).to(dtype),
        up=(normal(count, inner, hidden) / hidden**0.5).to(dtype),
        down=(normal(count, hidden, inner) / inner**0.5).to(dtype),
        **{name: normal(count, inner).to(dtype) for name in ("gate_bias", "up_bias") if biases},
        down_bias=normal(count, hidden).to(dtype) if biases else None,
    )


def packed(
    kernels: KernelSet, block: Block, *, top_k: int, activation: Activation = "silu", **routing: Any
) -> tuple[Routing, ExpertMatrices]:
    """The block as the op takes it."""
    assert kernels.pack_router is not None
    pair = None
    if block.gate_bias is not None and block.up_bias is not None:
        pair = torch.cat([stacked(block.gate_bias), stacked(block.up_bias)])
    down_bias = None if block.down_bias is None else stacked(block.down_bias)
    return (
        Routing(weight=kernels.pack_router(block.router, block.router_bias), top_k=top_k, **routing),
        ExpertMatrices(
            count=block.count,
            inner=block.gate.shape[1],
            gate_up=kernels.pack_gate_up(stacked(block.gate), stacked(block.up), pair),
            down=kernels.pack_linear(stacked(block.down), down_bias),
            activation=activation,
        ),
    )


def stacked(parts: Tensor) -> Tensor:
    """[E, N, ...] as the rows of one matrix, each expert's filled up with zeros."""
    beyond = expert_rows(parts.shape[1]) - parts.shape[1]
    return F.pad(parts, (*(0, 0) * (parts.dim() - 2), 0, beyond)).flatten(0, 1)


def expected(rows: Tensor, index: Tensor, weights: Tensor, block: Block, activation: Activation = "silu") -> Tensor:
    """The weighted sum [T, H] of the experts of normed rows, in float64 and in no particular order."""
    rows, total = rows.double(), torch.zeros(rows.shape, dtype=torch.float64)
    for row in range(len(rows)):
        for expert, weight in zip(index[row].tolist(), weights[row].double(), strict=True):
            gate, up = (matrix[expert].double() @ rows[row] for matrix in (block.gate, block.up))
            if block.gate_bias is not None and block.up_bias is not None:
                gate, up = gate + block.gate_bias[expert], up + block.up_bias[expert]
            inner = EXPECTED[activation].gated(gate, up)
            found = block.down[expert].double() @ inner
            total[row] += weight * (found if block.down_bias is None else found + block.down_bias[expert])
    return total
