"""A step over a pool that is NaN wherever no key or value of its sequences is.

Promises: sequences lie in shuffled blocks; block 0, free slots and other layers are NaN; the answer is the reference's,
computed in float32. Must not know: who computes the attention that is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_engine.execution.model_input import ModelInput
from quire_kernels.kernel_set import AttentionInput, AttentionShape
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.paged_kv import write_kv
from support.model_steps import Blocks, batch_of, input_of, scheduled

LAYER, NUM_LAYERS = 1, 3
CPU = torch.device("cpu")


def shape_of(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> AttentionShape:
    """A scale that is nobody's default."""
    return AttentionShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=0.7 * head_dim**-0.5, window=window
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """One layer's input."""

    shape: AttentionShape
    step: ModelInput
    kv: Tensor
    q: Tensor  # [T, Hq, D]

    def expected(self, step: AttentionInput | None = None, q: Tensor | None = None) -> Tensor:
        q = self.q if q is None else q
        return REFERENCE.attention(q.float(), self.shape, self.kv.float(), LAYER, step or self.step)


def paged_batch(
    slices: Sequence[tuple[int, int]],
    shape: AttentionShape,
    *,
    page: int,
    dtype: torch.dtype = torch.bfloat16,
    unsampled: Sequence[int] = (),
    seed: int = 0,
) -> PagedBatch:
    """Slices are (tokens present after the step, rows of them in the step); those in `unsampled` ask for no logits."""
    num_blocks = 1 + sum(-(-length // page) for length, _ in slices)
    blocks = Blocks(num_blocks, page, seed)
    items = [
        replace(
            scheduled([0] * length, blocks.take(length), length - rows, rows, all_logits=False),
            wants_sample=at not in unsampled,
        )
        for at, (length, rows) in enumerate(slices)
    ]
    step = input_of(batch_of(*items), page, CPU)
    kv = REFERENCE.new_kv(num_blocks, NUM_LAYERS, shape.num_kv_heads, page, shape.head_dim, dtype, CPU)
    kv.fill_(float("nan"))
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int, heads: int) -> Tensor:
        return torch.randn(length, heads, shape.head_dim, generator=generator).to(dtype)

    for (length, _), table in zip(slices, step.block_tables, strict=True):
        positions = torch.arange(length)
        slots = table[positions // page].long() * page + positions % page
        write_kv(kv, LAYER, slots, normal(length, shape.num_kv_heads), normal(length, shape.num_kv_heads))
    return PagedBatch(shape=shape, step=step, kv=kv, q=normal(len(step.positions), shape.num_heads))
