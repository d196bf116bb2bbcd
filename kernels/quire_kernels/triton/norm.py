"""RMSNorm in one launch.

Promises: the reference's rounding steps; the order of a row's sum depends only on the width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, WIDTH: tl.constexpr):  # noqa: PLR0917
    """Row `program_id(0)` of x [T, width] to out; WIDTH is the next power of two."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    wide = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.div_rn(tl.sum(wide * wide, 0), width.to(tl.float32))
    # Rounded before the multiplication with the weight, as in the reference: the product is exact in float32.
    normed = tl.div_rn(wide, tl.sqrt_rn(mean_square + eps)).to(out.dtype.element_ty)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row + columns, scale.to(tl.float32) * normed.to(tl.float32), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] / sqrt(mean(x^2) + eps) * weight [H] -> [T, H], a new tensor of x's dtype."""
    num_rows, width = x.shape
    if weight.shape != (width,) or weight.dtype != x.dtype:
        raise ValueError(f"norm must be {x.dtype} [{width}], not {weight.dtype} {list(weight.shape)}")
    x, out = x.contiguous(), torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows:
        room = triton.next_power_of_2(width)
        # Up to 16 values per thread stay in registers, so that the row is read once.
        rms_norm_kernel[(num_rows,)](x, weight, out, width, eps, WIDTH=room, num_warps=min(16, max(1, room // 512)))
    return out
