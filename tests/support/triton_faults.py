"""Calls that compile to what the audit is there to find.

Must not know: how the audit reads machine code.
"""

from __future__ import annotations

import torch

from quire_kernels.triton.norm import rms_norm, rms_norm_kernel
from quire_kernels.triton.product import product_kernel


def _spills(_: int) -> None:
    """16,384 columns in one warp: 512 values a thread."""
    x = torch.empty(4, 16384, dtype=torch.bfloat16)
    rms_norm_kernel[(4,)](x, x, x, 16384, 1e-6, WIDTH=16384, num_warps=1)


def _unaligned(_: int) -> None:
    """An odd width: no row but the first begins on 16 bytes."""
    rms_norm(torch.empty(4, 1023, dtype=torch.bfloat16), torch.empty(1023, dtype=torch.bfloat16), 1e-6)


def _few_warps(_: int) -> None:
    """64 rows for two warps: a warp group is four."""
    x = torch.empty(64, 1024, dtype=torch.bfloat16)
    product_kernel[(8,)](
        x, x, x, x, x, 64, 1024, 1024,
        HAS_BIAS=False, HAS_RESIDUAL=False, BLOCK_M=64, BLOCK_N=32, BLOCK_K=64, STAGES=2, num_warps=2,
    )  # fmt: skip


CASES = {"spills": _spills, "unaligned": _unaligned, "few warps": _few_warps}
