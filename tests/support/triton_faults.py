"""Calls that compile to what the audit is there to find.

Must not know: how the audit reads machine code.
"""

from __future__ import annotations

import math

import torch

from quire_kernels.kernel_set import AttentionShape, Norm
from quire_kernels.triton.attention import TritonAttention
from quire_kernels.triton.choose import choose
from quire_kernels.triton.norm import rms_norm, rms_norm_kernel
from quire_kernels.triton.pool import PoolSizes
from quire_kernels.triton.product import product_kernel
from support.triton_calls import choice_rows, step_of


def _spills(_: int) -> None:
    """16,384 columns in one warp: 512 values a thread."""
    x = torch.empty(4, 16384, dtype=torch.bfloat16)
    options = {"WIDE": False, "CENTRED": False, "ADDS": False, "WIDTH": 16384, "num_warps": 1}
    rms_norm_kernel[(4,)](x, x, x, x, 16384, 16384, 1e-6, 1.0, **options)


def _unaligned(_: int) -> None:
    """An odd width: no row but the first begins on 16 bytes."""
    rms_norm(torch.empty(4, 1023, dtype=torch.bfloat16), Norm(torch.empty(1023, dtype=torch.bfloat16), 1e-6))


def _few_warps(_: int) -> None:
    """64 rows for two warps: a warp group is four."""
    x = torch.empty(64, 1024, dtype=torch.bfloat16)
    product_kernel[(8,)](
        x, x, x, x, x, 64, 1024, 1024, 1.0,
        HAS_BIAS=False, HAS_RESIDUAL=False, BLOCK_M=64, BLOCK_N=32, BLOCK_K=64, STAGES=2, num_warps=2,
    )  # fmt: skip


def _unaligned_fp8(_: int) -> None:
    """A pool that begins anywhere: no run of codes is known to begin on 8 bytes."""
    sizes = PoolSizes(num_layers=2, num_kv_heads=8, page=16, head_dim=128, fp8=True)
    shape = (8, sizes.num_layers, 2, sizes.num_kv_heads, sizes.head_stride)
    kv = torch.empty(math.prod(shape) + 4, dtype=torch.uint8)[4:].view(shape)
    layer = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, scale=1.0)
    q = torch.empty(1, 32, 128, dtype=torch.bfloat16)
    TritonAttention("fp8").attention(q, layer, kv, 1, step_of((1, 3000)))


def _odd_vocabulary(_: int) -> None:
    """No row of logits but the first begins on 16 bytes, in one digit's bins too."""
    choose(torch.empty(8, 151_937, dtype=torch.float32), choice_rows(8))


def _spills_in_a_loop(_: int) -> None:
    """128 x 128 sums in one warp: 512 of them a thread, in every turn over k."""
    x = torch.empty(128, 1024, dtype=torch.bfloat16)
    product_kernel[(8,)](
        x, x, x, x, x, 128, 1024, 1024, 1.0,
        HAS_BIAS=False, HAS_RESIDUAL=False, BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, STAGES=2, num_warps=1,
    )  # fmt: skip


CASES = {
    "spills": _spills,
    "spills in a loop": _spills_in_a_loop,
    "unaligned": _unaligned,
    "unaligned fp8": _unaligned_fp8,
    "odd vocabulary": _odd_vocabulary,
    "few warps": _few_warps,
}
