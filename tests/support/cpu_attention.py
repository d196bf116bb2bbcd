"""What tests of the C++ attention share: kernels of one instruction set, sequences in a poisoned pool, an exact answer.

Promises: keys and values reach the pool through `rope_write` alone, so that no test knows the layout.
Must not know: the scheduler, how the kernels compute.
"""

from __future__ import annotations

import torch

from quire_kernels.cpu.attention import CpuAttention
from quire_kernels.cpu.context import Context
from quire_kernels.cpu.library import load_library
from quire_kernels.kernel_set import AttentionShape
from support.model_steps import Blocks, batch_of, input_of, scheduled

KV_TYPES = ("bf16", "int8")
LAYER, NUM_LAYERS = 1, 2
CPU = torch.device("cpu")


def shape_of(heads, kv_heads, head_dim, window=None, **norms) -> AttentionShape:
    return AttentionShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, window=window, **norms
    )


class Kernels:
    """The attention ops with workers of their own."""

    def __init__(self, variant, *, threads: int, kv_type: str) -> None:
        self.kv_type = kv_type
        self.context = Context(load_library(variant), threads)
        self.ops = CpuAttention(self.context, kv_type)


class Sequences:
    """Sequences with random queries, keys and values, of which slices can be attended to in a poisoned pool."""

    def __init__(self, lengths, shape, *, block_size=16, seed=0, spread=1.0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, shape.head_dim, generator=generator)

        self.shape, self.block_size = shape, block_size
        self.q = [(normal(length, shape.num_heads) * spread).bfloat16() for length in lengths]
        self.k = [normal(length, shape.num_kv_heads).bfloat16() for length in lengths]
        self.v = [normal(length, shape.num_kv_heads).bfloat16() for length in lengths]

    def fill(self, kernels, slices, *, seed=0, poison=0xFF, spare_blocks=0, lost_blocks=0):
        """A pool with all that the slices (sequence, start, rows) need, and the step that attends to them.

        Every byte is `poison` first. The first `lost_blocks` table entries of each sequence name no block.
        """
        num_blocks = 1 + spare_blocks + sum(-(-(start + rows) // self.block_size) for _, start, rows in slices)
        blocks = Blocks(num_blocks, self.block_size, seed)
        shape = self.shape
        pool = kernels.ops.new_kv(
            num_blocks, NUM_LAYERS, shape.num_kv_heads, self.block_size, shape.head_dim, torch.bfloat16, CPU
        )
        pool.view(torch.uint8).fill_(poison)
        tables = [blocks.take(start + rows) for _, start, rows in slices]
        ends = [start + rows for _, start, rows in slices]
        written = [scheduled([0] * end, table, 0, end) for table, end in zip(tables, ends, strict=True)]
        step = input_of(batch_of(*written), self.block_size, CPU)
        unturned = torch.cat(
            [torch.ones(max(ends), shape.head_dim // 2), torch.zeros(max(ends), shape.head_dim // 2)], 1
        )
        qkv = [
            torch.cat([x[sequence][:end].flatten(1) for x in (self.q, self.k, self.v)], dim=1)
            for (sequence, _, _), end in zip(slices, ends, strict=True)
        ]
        plain = shape_of(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        kernels.ops.rope_write(torch.cat(qkv), unturned, plain, pool, LAYER, step)
        items = [
            scheduled([0] * (start + rows), table, start, rows)
            for (_, start, rows), table in zip(slices, tables, strict=True)
        ]
        step = input_of(batch_of(*items), self.block_size, CPU)
        step.block_tables[:, :lost_blocks] = -1
        return pool, step

    def attend(self, kernels, slices, **options) -> list[torch.Tensor]:
        """The slices' rows, [rows, Hq * D] each, of one call."""
        pool, step = self.fill(kernels, slices, **options)
        q = torch.cat([self.q[sequence][start : start + rows] for sequence, start, rows in slices])
        out = kernels.ops.attention(q, self.shape, pool, LAYER, step)
        return list(out.split([rows for _, _, rows in slices]))

    def exact(self, sequence: int, kv_type: str, rows: int | None = None) -> torch.Tensor:
        """The last `rows` rows (all) of a sequence by the textbook, in float64: [rows, Hq * D]."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        q, k, v = (x[sequence].double() for x in (self.q, self.k, self.v))
        if kv_type == "int8":
            k, v = as_int8(k), as_int8(v)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        positions = torch.arange(len(k))
        queries = positions[-(rows or len(k)) :]
        distance = queries[:, None] - positions
        distance = distance.abs() if self.shape.bidirectional else distance
        visible = (distance >= 0) & (distance < (self.shape.window or len(k)))
        scores = torch.einsum("qhd,khd->hqk", q[queries], k) * self.shape.scale
        weights = textbook_weights(scores, visible, self.shape)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def textbook_weights(scores: torch.Tensor, visible: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Of scaled scores [H, Q, K] in float64: with the layer's cap, and beside its sinks."""
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if shape.sinks is None:
        return scores.softmax(-1)
    sinks = shape.sinks.to(scores).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]


def as_int8(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] as a pool of int8 holds it: one scale per token and head. Ties are frequent among bf16 numbers."""
    most = x.float().abs().amax(dim=-1, keepdim=True)
    per_step = torch.tensor(127.0) / most  # a plain number would be multiplied by the inverse
    return (x.float() * per_step).round().double() * (most / 127).double()
