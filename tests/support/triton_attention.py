"""What tests of the Triton attention share: sequences in a pool that is NaN wherever it should not be read.

Promises: keys and values are written as the pool's definition says, not by the kernels; the answer is the reference's.
Must not know: how the kernels compute.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from quire_engine.execution.model_input import ModelInput
from quire_kernels.kernel_set import AttentionShape
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.paged_kv import write_kv
from quire_kernels.triton.attention import TritonAttention
from support.model_steps import Blocks, batch_of, input_of, scheduled

DEVICE = torch.device(os.environ.get("QUIRE_TRITON_DEVICE", "cpu"))  # the simulators' tensors are the CPU's
LAYER, NUM_LAYERS = 1, 3
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
LARGEST = 448.0  # of e4m3


def shape_of(
    heads: int = 4, kv_heads: int = 2, head_dim: int = 64, window: int | None = None, **norms: torch.Tensor
) -> AttentionShape:
    return AttentionShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, window=window, **norms
    )


def as_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] as an fp8 pool holds it: the values' bits, and one float32 scale for each row.

    Computed on the CPU: on a GPU torch divides by a number of Python's as it multiplies by the reciprocal.
    """
    wide = x.float().cpu()
    most = wide.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(most > 1e-30, torch.tensor(LARGEST) / most, torch.zeros(()))
    bits = (wide * inverse).to(torch.float8_e4m3fn).view(torch.uint8)
    return bits.to(x.device), (most / LARGEST).squeeze(-1).to(x.device)


def from_e4m3(bits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.float8_e4m3fn).float() * scales.unsqueeze(-1)


class Sequences:
    """Sequences with random queries, keys and values, of which slices can be attended to."""

    def __init__(
        self,
        lengths: Sequence[int],
        shape: AttentionShape,
        dtype: torch.dtype = torch.bfloat16,
        *,
        page: int = 16,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, shape.head_dim, generator=generator).to(DEVICE, dtype)

        self.shape, self.dtype, self.page = shape, dtype, page
        self.q = [normal(length, shape.num_heads) for length in lengths]
        self.k = [normal(length, shape.num_kv_heads) for length in lengths]
        self.v = [normal(length, shape.num_kv_heads) for length in lengths]

    def step(self, slices: Sequence[tuple[int, int, int]], *, seed: int = 0) -> tuple[int, ModelInput]:
        """The number of blocks and the step of slices (sequence, start, rows) in blocks of their own."""
        num_blocks = 1 + sum(-(-(start + rows) // self.page) for _, start, rows in slices)
        blocks = Blocks(num_blocks, self.page, seed)
        items = [
            scheduled([0] * (start + rows), blocks.take(start + rows), start, rows, all_logits=False)
            for _, start, rows in slices
        ]
        step = input_of(batch_of(*items), self.page, DEVICE)
        return num_blocks, step

    def pool(
        self, slices: Sequence[tuple[int, int, int]], *, fp8: bool = False, seed: int = 0
    ) -> tuple[torch.Tensor, ModelInput]:
        """All that the slices need, in a pool where every other byte is part of a NaN: block 0, free slots, layers."""
        num_blocks, step = self.step(slices, seed=seed)
        sizes = (num_blocks, NUM_LAYERS, self.shape.num_kv_heads, self.page, self.shape.head_dim)
        kv = TritonAttention("fp8" if fp8 else "auto").new_kv(*sizes, self.dtype, DEVICE)
        kv.view(torch.uint8).fill_(0xFF)
        for (sequence, start, rows), table in zip(slices, step.block_tables, strict=True):
            positions = torch.arange(start + rows, device=DEVICE)
            slots = table[positions // self.page].long() * self.page + positions % self.page
            keys, values = self.k[sequence][: start + rows], self.v[sequence][: start + rows]
            if fp8:
                _write_fp8(kv, slots, keys, values, self.page)
            else:
                write_kv(kv, LAYER, slots, keys, values)
        return kv, step

    def attend(
        self,
        slices: Sequence[tuple[int, int, int]],
        *,
        fp8: bool = False,
        deterministic: bool = False,
        seed: int = 0,
        ops: TritonAttention | None = None,
    ) -> list[torch.Tensor]:
        """The slices' rows, [rows, Hq * D] each, of one call."""
        kv, step = self.pool(slices, fp8=fp8, seed=seed)
        ops = ops or TritonAttention("fp8" if fp8 else "auto", deterministic=deterministic)
        out = ops.attention(self._queries(slices), self.shape, kv, LAYER, step)
        return list(out.split([rows for _, _, rows in slices]))

    def expected(self, slices: Sequence[tuple[int, int, int]], *, fp8: bool = False) -> list[torch.Tensor]:
        """The same rows by the reference, in float32."""
        num_blocks, step = self.step(slices)
        sizes = (num_blocks, 1, self.shape.num_kv_heads, self.page, self.shape.head_dim)
        kv = REFERENCE.new_kv(*sizes, torch.float32, DEVICE)
        for (sequence, start, rows), table in zip(slices, step.block_tables, strict=True):
            positions = torch.arange(start + rows, device=DEVICE)
            slots = table[positions // self.page].long() * self.page + positions % self.page
            held = [x[sequence][: start + rows] for x in (self.k, self.v)]
            write_kv(kv, 0, slots, *((from_e4m3(*as_e4m3(x)) if fp8 else x.float()) for x in held))
        out = REFERENCE.attention(self._queries(slices).float(), self.shape, kv, 0, step)
        return list(out.split([rows for _, _, rows in slices]))

    def check(self, slices: Sequence[tuple[int, int, int]], **options) -> None:
        """Every row of a call against the reference; NaN equals nothing."""
        wanted = self.expected(slices, fp8=options.get("fp8", False))
        for at, found, rows in zip(slices, self.attend(slices, **options), wanted, strict=True):
            assert_close(found, rows, self.dtype, at)

    def _queries(self, slices: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        return torch.cat([self.q[sequence][start : start + rows] for sequence, start, rows in slices])


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, what: object = "") -> None:
    error = (found.float() - wanted.float()).abs()
    assert torch.allclose(found.float(), wanted.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]), (what, error)


def _write_fp8(kv: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page: int) -> None:
    """Into the layer LAYER of [blocks, layers, 2, Hkv, page * (D + 4)] bytes."""
    head_dim = keys.shape[-1]
    blocks, offsets = slots // page, slots % page
    for half, x in enumerate((keys, values)):
        bits, scales = as_e4m3(x)
        heads = kv[:, LAYER, half]  # [blocks, Hkv, page * (D + 4)]
        stored = heads[..., : page * head_dim].unflatten(-1, (page, head_dim))
        stored[blocks, :, offsets] = bits
        heads[..., page * head_dim :].view(torch.float32)[blocks, :, offsets] = scales
