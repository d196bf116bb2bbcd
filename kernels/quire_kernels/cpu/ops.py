"""The ops of the CPU kernel set over one pool of worker threads.

Promises: shapes and types are checked here, so that C++ gets valid pointers only; activations are bfloat16. Must not
know: requests.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial

import torch
from torch import Tensor

from quire_kernels.cpu.attention import CpuAttention, KVType
from quire_kernels.cpu.choice import load_chosen
from quire_kernels.cpu.context import Arena, Context
from quire_kernels.cpu.layers import CpuLayers
from quire_kernels.cpu.library import OnCompiled
from quire_kernels.cpu.packing import KINDS, PackedLinear, Packer, packed_form
from quire_kernels.cpu.topology import by_core
from quire_kernels.kernel_set import KernelSet, Quantization
from quire_kernels.reference import REFERENCE

_BF16 = torch.bfloat16


def cpu_kernel_set(
    threads: int | None = None,
    quantization: Quantization | None = None,
    *,
    kv_type: KVType = "bf16",
    cpu_variant: str | None = None,
    library: ctypes.CDLL | None = None,
    on_compiled: OnCompiled | None = None,
) -> KernelSet:
    """The kernel set for bfloat16 models, with `threads` workers of its own, including the calling thread.

    None: one per usable core. `kv_type`: the type of the pool. `cpu_variant`: the instruction set, None: the fastest.
    Raises KernelBuildError where the C++ cannot be compiled, UnusableVariant where it cannot run.
    """
    why = ""
    if library is None:
        chosen = load_chosen(cpu_variant, on_compiled=on_compiled)
        library, why = chosen.library, chosen.why
    context = Context(library, threads or len(by_core(os.sched_getaffinity(0))))
    packer = Packer(context, quantization, Arena().allocate)
    linear, attention = LinearOps(context), CpuAttention(context, kv_type)
    return KernelSet(
        name="cpu",
        pack_linear=packer.linear,
        pack_gate_up=packer.gate_up,
        embed=REFERENCE.embed,
        norm_linear=linear.norm_linear,
        norm_gate_up=linear.norm_linear,
        linear_add=linear.linear_add,
        linear=linear.linear,
        rope_write=attention.rope_write,
        attention=attention.attention,
        logits=linear.logits,
        greedy=linear.greedy,
        new_kv=attention.new_kv,
        kv_block_bytes=attention.kv_block_bytes,
        packed_bits=KINDS[quantization].bits,
        packed_bytes=lambda weight: weight.num_bytes,
        bind_layers=partial(CpuLayers, context, attention),
        packed_form=packed_form(context, quantization),
        own_threads=True,
        variant=library.quire_variant().decode(),
        why_variant=why,
    )


class LinearOps:
    """Projections, fused with the norm before them and the op after them."""

    def __init__(self, context: Context) -> None:
        self._context = context  # keeps the workers
        self._handle = context.handle
        self._norm_linear = context.library.quire_norm_linear
        self._greedy = context.library.quire_greedy
        self._linear_add = context.library.quire_linear_add

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, w: PackedLinear) -> Tensor:
        """Also for a gate-up pair, whose packed matrix says so."""
        return self._normed(x, norm, eps, w, torch.bfloat16)

    def linear(self, x: Tensor, w: PackedLinear, wide: bool) -> Tensor:
        return self._normed(x, None, 0.0, w, torch.float32 if wide else torch.bfloat16)

    def logits(self, x: Tensor, norm: Tensor, eps: float, w: PackedLinear) -> Tensor:
        return self._normed(x, norm, eps, w, torch.float32)

    def greedy(
        self, x: Tensor, norm: Tensor | None, eps: float, w: PackedLinear, allowed: Tensor | None = None
    ) -> tuple[list[int], list[bool]]:
        """The argmax of `logits`, or of `linear`, without writing them to memory."""
        x = _rows(x, w.num_inputs)
        if norm is not None:
            _check_norm(norm, w.num_inputs)
        rows = x.shape[0]
        columns, finite = (ctypes.c_int64 * rows)(), (ctypes.c_uint8 * rows)()
        bits = None if allowed is None else _bits(allowed, rows, w.num_outputs)
        scale = None if norm is None else norm.data_ptr()
        if self._greedy(self._handle, w.address, x.data_ptr(), rows, scale, eps, bits, columns, finite):
            raise MemoryError(f"multiplying {rows} rows")
        return list(columns), [bool(value) for value in finite]

    def linear_add(self, x: Tensor, w: PackedLinear, residual: Tensor) -> Tensor:
        x = _rows(x, w.num_inputs)
        residual = _rows(residual, w.num_outputs)
        rows = x.shape[0]
        if residual.shape[0] != rows:
            raise ValueError(f"{rows} rows cannot be added to {residual.shape[0]}")
        source, target = x.data_ptr(), residual.data_ptr()
        if source == target and rows:  # in place, results would be read as inputs
            raise ValueError("x and residual must not share memory")
        if self._linear_add(self._handle, w.address, source, rows, target, target):
            raise MemoryError(f"multiplying {rows} rows")
        return residual

    def _normed(self, x: Tensor, norm: Tensor | None, eps: float, w: PackedLinear, dtype: torch.dtype) -> Tensor:
        x = _rows(x, w.num_inputs)
        if norm is not None:
            _check_norm(norm, w.num_inputs)
        rows = x.shape[0]
        out = torch.empty(rows, w.num_outputs, dtype=dtype)
        as_float = dtype is torch.float32
        arguments = (x.data_ptr(), rows, None if norm is None else norm.data_ptr(), eps, out.data_ptr(), as_float)
        if self._norm_linear(self._handle, w.address, *arguments):
            raise MemoryError(f"multiplying {rows} rows")
        return out


def _bits(allowed: Tensor, rows: int, columns: int) -> int:
    shape = (rows, -(-columns // 64))
    if allowed.dtype is not torch.int64 or tuple(allowed.shape) != shape or not allowed.is_contiguous():
        raise ValueError(f"allowed must be contiguous int64 {list(shape)}, not {allowed.dtype} {list(allowed.shape)}")
    return allowed.data_ptr()


def _check_norm(norm: Tensor, width: int) -> None:
    if norm.dtype is not _BF16 or norm.numel() != width:
        raise ValueError(f"norm must be bfloat16 [{width}], not {norm.dtype} {list(norm.shape)}")


def _rows(x: Tensor, width: int) -> Tensor:
    if x.dtype is not _BF16 or x.dim() != 2 or x.shape[1] != width or not x.is_cpu:
        raise ValueError(f"expected bfloat16 [rows, {width}] on the CPU, got {x.dtype} {list(x.shape)} on {x.device}")
    return x if x.is_contiguous() else x.contiguous()
