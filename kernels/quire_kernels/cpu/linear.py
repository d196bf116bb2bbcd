"""Projections and norms through the C++ kernels.

Promises: shapes and types are checked here, so that C++ gets valid pointers only; activations are bfloat16. Must not
know: requests.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from enum import IntEnum
from typing import get_args

import torch
from torch import Tensor

from quire_kernels.activations import Activation
from quire_kernels.cpu.context import Context
from quire_kernels.cpu.low_rank import BoundAdapter, addend_args, bind_adapter, pack_low_rank
from quire_kernels.cpu.packing import PackedLinear
from quire_kernels.cpu.ranks import raise_for_lost
from quire_kernels.cpu.signatures import NormArgs
from quire_kernels.cpu.stored import STORED_KINDS, OffsetForm
from quire_kernels.kernel_set import AdaptedOps, Addend, Norm

_BF16 = torch.bfloat16


class Epilogue(IntEnum):
    """`enum class Epilogue`, as far as an op names one, without the activations."""

    STORE = 0
    STORE_FLOAT = 1


_FIRST_GATE = 4  # of `Epilogue`, behind those that are no activation
GATES: dict[Activation, int] = {name: _FIRST_GATE + place for place, name in enumerate(get_args(Activation))}


class LinearOps:
    """Projections, fused with the norm before them and the op after them."""

    def __init__(self, context: Context) -> None:
        """ValueError where the library was compiled with other activations."""
        compiled = tuple(context.library.quire_activations().decode().split())
        if compiled != get_args(Activation):
            raise ValueError(f"the activations are {compiled} in C++ and {get_args(Activation)} in Python")
        self._context = context  # keeps the workers
        self._handle = context.handle
        self._norm_linear = context.library.quire_norm_linear
        self._greedy = context.library.quire_greedy
        self._stored_rows = context.library.quire_stored_rows
        self._linear_add = context.library.quire_linear_add
        self._norm_add = context.library.quire_norm_add
        self._mul_sigmoid = context.library.quire_mul_sigmoid

    @property
    def adapted(self) -> AdaptedOps:
        """The projections with what adapters add."""
        return AdaptedOps(
            pack=pack_low_rank,
            bind=bind_adapter,
            num_bytes=lambda low_rank: low_rank.num_bytes,
            itemsize=_BF16.itemsize,
            norm_linear=lambda x, norm, w, addend: self._normed(x, norm, w, Epilogue.STORE, addend),
            norm_gate_up=lambda x, norm, w, act, addend: self._normed(x, norm, w, GATES[act], addend),
            linear_add=self.linear_add,
            told=BoundAdapter.told,
            restored=BoundAdapter.restored,
        )

    def embed_stored(self, w: PackedLinear, ids: Tensor) -> Tensor:
        """The rows `ids` of a matrix that others quantised, as bfloat16."""
        if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_cpu:
            raise ValueError(f"ids must be int64 on the CPU, not {ids.dtype} {list(ids.shape)} on {ids.device}")
        if w.gate_up or w.args.kind not in STORED_KINDS.values() or w.args.offset_form == OffsetForm.ZERO_POINT:
            raise ValueError("rows are taken from a matrix that others quantised without zero points")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < w.num_outputs:
            raise ValueError(f"ids must be rows of the matrix's {w.num_outputs}")
        ids, out = ids.contiguous(), torch.empty(len(ids), w.num_inputs, dtype=_BF16)
        if self._stored_rows(self._handle, w.address, ids.data_ptr(), len(ids), out.data_ptr()):
            raise MemoryError(f"looking up {len(ids)} rows")
        return out

    def norm_linear(self, x: Tensor, norm: Norm | None, w: PackedLinear) -> Tensor:
        return self._normed(x, norm, w, Epilogue.STORE)

    def linear(self, x: Tensor, w: PackedLinear, wide: bool) -> Tensor:
        return self._normed(x, None, w, Epilogue.STORE_FLOAT if wide else Epilogue.STORE)

    def norm_gate_up(self, x: Tensor, norm: Norm | None, w: PackedLinear, activation: Activation) -> Tensor:
        return self._normed(x, norm, w, GATES[activation])

    def logits(self, x: Tensor, norm: Norm, w: PackedLinear) -> Tensor:
        return self._normed(x, norm, w, Epilogue.STORE_FLOAT)

    def greedy(
        self, x: Tensor, norm: Norm | None, w: PackedLinear, allowed: Tensor | None = None
    ) -> tuple[list[int], list[bool]]:
        """The argmax of `logits`, or of `linear`, without writing them to memory."""
        x = rows_of(x, w.num_inputs)
        rows = x.shape[0]
        columns, finite = (ctypes.c_int64 * rows)(), (ctypes.c_uint8 * rows)()
        bits = None if allowed is None else _bits(allowed, rows, w.num_outputs)
        arguments = None if norm is None else byref(norm_args(norm, w.num_inputs))
        _raise_for(self._greedy(self._handle, w.address, x.data_ptr(), rows, arguments, bits, columns, finite), rows)
        return list(columns), [bool(value) for value in finite]

    def linear_add(
        self, x: Tensor, w: PackedLinear, residual: Tensor, scale: float = 1.0, addend: Addend | None = None
    ) -> Tensor:
        x = rows_of(x, w.num_inputs)
        residual = rows_of(residual, w.num_outputs)
        rows = x.shape[0]
        if residual.shape[0] != rows:
            raise ValueError(f"{rows} rows cannot be added to {residual.shape[0]}")
        source, target = x.data_ptr(), residual.data_ptr()
        if source == target and rows:  # in place, results would be read as inputs
            raise ValueError("x and residual must not share memory")
        added = None if addend is None else byref(addend_args(addend, w, rows))
        _raise_for(self._linear_add(self._handle, w.address, source, rows, scale, target, target, added, 0), rows)
        return residual

    def norm_add(self, y: Tensor, norm: Norm, residual: Tensor, scale: float = 1.0) -> Tensor:
        width = y.shape[-1]
        y, residual = rows_of(y, width), rows_of(residual, width)
        if residual.shape[0] != y.shape[0]:
            raise ValueError(f"{y.shape[0]} rows cannot be added to {residual.shape[0]}")
        arguments = byref(norm_args(norm, width))
        if self._norm_add(self._handle, y.data_ptr(), y.shape[0], width, arguments, scale, residual.data_ptr()):
            raise MemoryError(f"adding {y.shape[0]} rows")
        return residual

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        width = x.shape[-1]
        x, gate = rows_of(x, width), rows_of(gate, width)
        if gate.shape[0] != x.shape[0]:
            raise ValueError(f"{gate.shape[0]} rows cannot be a gate of {x.shape[0]}")
        if self._mul_sigmoid(self._handle, gate.data_ptr(), x.shape[0], width, x.data_ptr()):
            raise MemoryError(f"gating {x.shape[0]} rows")
        return x

    def _normed(
        self, x: Tensor, norm: Norm | None, w: PackedLinear, epilogue: int, addend: Addend | None = None
    ) -> Tensor:
        x = rows_of(x, w.num_inputs)
        if w.gate_up != (epilogue in GATES.values()):
            raise ValueError("a gate-up pair has an activation, and no other matrix has one")
        rows = x.shape[0]
        dtype = torch.float32 if epilogue == Epilogue.STORE_FLOAT else _BF16
        out = torch.empty(rows, w.num_outputs, dtype=dtype)
        arguments = None if norm is None else byref(norm_args(norm, w.num_inputs))
        added = None if addend is None else byref(addend_args(addend, w, rows))
        operands = (x.data_ptr(), rows, arguments, out.data_ptr(), epilogue)
        _raise_for(self._norm_linear(self._handle, w.address, *operands, added, 0), rows)
        return out


def _raise_for(failed: int, rows: int) -> None:
    raise_for_lost(failed)
    if failed:
        raise MemoryError(f"multiplying {rows} rows")


def norm_args(norm: Norm, width: int) -> NormArgs:
    """The norm for C++, of rows of `width`; the weight is the caller's to keep."""
    weight = norm.weight
    if weight.dtype not in (_BF16, torch.float32) or weight.numel() != width or not weight.is_contiguous():
        raise ValueError(f"norm must be bfloat16 or float32 [{width}], not {weight.dtype} {list(weight.shape)}")
    as_float = weight.dtype is torch.float32
    if norm.centred and not as_float:
        raise ValueError("the weight of a centred norm must be float32")
    return NormArgs(weight=weight.data_ptr(), eps=norm.eps, as_float=as_float, centred=norm.centred)


def _bits(allowed: Tensor, rows: int, columns: int) -> int:
    shape = (rows, -(-columns // 64))
    if allowed.dtype is not torch.int64 or tuple(allowed.shape) != shape or not allowed.is_contiguous():
        raise ValueError(f"allowed must be contiguous int64 {list(shape)}, not {allowed.dtype} {list(allowed.shape)}")
    return allowed.data_ptr()


def rows_of(x: Tensor, width: int) -> Tensor:
    """x as contiguous rows. ValueError unless they are bfloat16 [rows, width] on the CPU."""
    if x.dtype is not _BF16 or x.dim() != 2 or x.shape[1] != width or not x.is_cpu:
        raise ValueError(f"expected bfloat16 [rows, {width}] on the CPU, got {x.dtype} {list(x.shape)} on {x.device}")
    return x if x.is_contiguous() else x.contiguous()
