"""What Triton's interpreter needs to compute as a GPU does: products of bf16 and fp16, exactly, with float32 results.

Promises: applied once, before kernels run; a row of a product does not depend on the others, since sums are exact to
the last bit of float32 but for rounding. Must not know: any kernel.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_HALVES = (tl.bfloat16, tl.float16)


def repair() -> None:
    """Replace the interpreter's product: it takes the bits of bf16, which numpy lacks, for integers."""
    np.seterr(invalid="ignore", divide="ignore")  # as a GPU: padding may be NaN where nobody looks
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def create_dot(self, a, b, d, *rest):
        if a.dtype.scalar not in _HALVES:
            return original(self, a, b, d, *rest)
        product = np.matmul(_wide(a), _wide(b)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


def _wide(handle) -> np.ndarray:
    """float64: sums of products of halves round there so rarely otherwise that float32 does not show their order."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)
