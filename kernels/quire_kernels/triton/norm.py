"""RMS norm or layer norm in one launch, with or without the addition behind it.

Promises: the reference's rounding steps; the order of a row's sum depends only on the width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.kernel_set import Norm


@triton.jit
def rms_norm_kernel(  # noqa: PLR0917
    x,
    weight,
    residual,
    out,
    width,
    stride,
    eps,
    factor,
    WIDE: tl.constexpr,
    CENTRED: tl.constexpr,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Row `program_id(0)` of x [T, width] to out; WIDTH is the next power of two. Rows are `stride` apart in both.

    WIDE: the weight is float32 and multiplies before the only rounding, else it multiplies the rounded quotient.
    CENTRED: the norm of the row less its mean.
    """
    row = tl.program_id(0).to(tl.int64) * stride
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    wide = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.div_rn(tl.sum(wide, 0), width.to(tl.float32)), 0.0)
    mean_square = tl.div_rn(tl.sum(wide * wide, 0), width.to(tl.float32))
    normed = tl.div_rn(wide, tl.sqrt_rn(mean_square + eps))
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    if not WIDE:  # rounded before the multiplication too, as in the reference: the product is exact in float32
        normed = normed.to(dtype).to(tl.float32)
    value = (scale.to(tl.float32) * normed).to(dtype)
    if ADDS:
        before = tl.load(residual + row + columns, mask=inside, other=0.0)
        value = ((before.to(tl.float32) + value.to(tl.float32)) * factor).to(dtype)
    tl.store(out + row + columns, value, mask=inside)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x [T, H] normed -> [T, H], a new tensor of x's dtype."""
    x = x.contiguous()
    return _launch(x, norm, None, torch.empty_like(x))


def norm_add(y: Tensor, norm: Norm, residual: Tensor, scale: float = 1.0) -> Tensor:
    """residual [T, H] = (residual + the normed y [T, H]) * scale, in place."""
    return _launch(y.contiguous(), norm, residual, residual, scale)


def rms_norm_(x: Tensor, norm: Norm) -> Tensor:
    """x [T, H] normed in place; its rows may lie apart."""
    return _launch(x, norm, None, x)


def _launch(x: Tensor, norm: Norm, residual: Tensor | None, out: Tensor, factor: float = 1.0) -> Tensor:
    (num_rows, width), weight = x.shape, norm.weight
    wide = weight.dtype != x.dtype
    if weight.shape != (width,) or (wide and weight.dtype != torch.float32):
        raise ValueError(f"norm must be {x.dtype} or float32 [{width}], not {weight.dtype} {list(weight.shape)}")
    if out.stride() != x.stride() or x.stride(1) != 1:
        raise ValueError(f"rows {list(x.shape)} with strides {x.stride()} do not fit those of {out.stride()}")
    if num_rows:
        room = triton.next_power_of_2(width)
        # Up to 16 values per thread stay in registers, so that the row is read once.
        rms_norm_kernel[(num_rows,)](
            x, weight, out if residual is None else residual, out, width, x.stride(0), norm.eps, factor,
            WIDE=wide, CENTRED=norm.centred, ADDS=residual is not None, WIDTH=room,
            num_warps=min(16, max(1, room // 512)),
        )  # fmt: skip
    return out
