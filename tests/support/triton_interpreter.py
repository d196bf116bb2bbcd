"""What Triton's interpreter needs to compute as a GPU does: bf16, which numpy lacks, and products of halves.

Promises: applied once, before kernels run; a row of a product does not depend on the others, since sums are kept in
float64 and rounded once. Must not know: any kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_HALVES = (tl.bfloat16, tl.float16)


def repair() -> None:
    """The interpreter takes bf16's bits for integers in a product, and cuts them off instead of rounding."""
    np.seterr(invalid="ignore", divide="ignore", over="ignore")  # as a GPU: padding may be NaN where nobody looks
    builder = interpreter.InterpreterBuilder
    dot, convert = builder.create_dot, interpreter._convert_float

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype.scalar not in _HALVES:
            return dot(self, a, b, d, *rest)
        product = np.matmul(_wide(a), _wide(b)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            return _to_bfloat16(data)
        if (source, target) == (tl.bfloat16, tl.float32):
            return _from_bfloat16(data)
        return convert(data, source, target, rounding)

    builder.create_dot = create_dot
    interpreter._convert_float = convert_float
    _patch_once_a_launch()


def _patch_once_a_launch() -> None:
    """The interpreter puts its functions into the language again whenever a kernel calls a function: half the time."""
    launch = interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        where = id(self.fn.__globals__)
        if where not in patched:
            patched.add(where)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__ = run, call


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _wide(handle: Any) -> np.ndarray:
    data = _from_bfloat16(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data
    return data.astype(np.float64)
