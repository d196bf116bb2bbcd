"""activation(gate) * up, or x * sigmoid(gate), in one launch.

Promises: elementwise in float32 and rounded once, as the reference does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.activations import Activation

_BLOCK = 1024  # columns of a program: eight for each thread of four warps, one wide load


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up of float32 numbers, by the activations' definitions."""
    if ACTIVATION == "silu":  # of another name `inner` is not defined, which ends the compilation
        inner = -gate
    if ACTIVATION == "gelu_tanh":
        inner = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # -2 sqrt(2 / pi)
    if ACTIVATION == "swiglu_clamped":  # NaN stays NaN
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        inner = -1.702 * gate
    return tl.div_rn(gate, 1.0 + tl.exp(inner)) * up


@triton.jit
def gate_mul_kernel(gate_up, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Row `program_id(0)`, columns of `program_id(1)`: gate_up [T, 2 width] holds the gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    value = activated(gate, up, ACTIVATION)
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 I] -> activation(gate) * up [T, I]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up, out = gate_up.contiguous(), gate_up.new_empty(num_rows, width)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        gate_mul_kernel[grid](gate_up, out, width, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def mul_sigmoid_kernel(x, gate, count, BLOCK: tl.constexpr):
    """BLOCK numbers of x and gate, `count` each, into x's places."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    number = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, tl.div_rn(number, 1.0 + tl.exp(-opening)).to(x.dtype.element_ty), mask=inside)


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, N] * sigmoid(gate [T, N]), in x's memory."""
    if x.shape != gate.shape or x.dtype != gate.dtype:
        raise ValueError(f"a gate of {gate.dtype} {list(gate.shape)} is not one of {x.dtype} {list(x.shape)}")
    x, gate = x.contiguous(), gate.contiguous()
    if x.numel():
        mul_sigmoid_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, gate, x.numel(), BLOCK=_BLOCK, num_warps=4)
    return x
