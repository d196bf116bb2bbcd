"""Weight matrices as the C++ kernels read them: packed, perhaps quantised, in memory with huge pages.

Promises: a packed matrix owns its memory and never points at the tensor that it came from.
Must not know: layers, files, what a matrix is for.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.cpu.memory import Arena
from quire_kernels.cpu.signatures import LinearArgs
from quire_kernels.kernel_set import Quantization

_KINDS: dict[Quantization | None, int] = {None: 0, "int8": 1, "int4": 2}
_PANEL_ROWS = 64
_K_MULTIPLE = 32
_MAX_K = 65536  # int32 sums of products of bytes


class PackedLinear(NamedTuple):
    """A packed matrix. `address` is that of `args`, the structure that C++ reads; the rest keeps memory alive."""

    address: int
    num_outputs: int  # columns of the op's result: I for a gate-up pair
    num_inputs: int
    gate_up: bool
    args: LinearArgs
    memory: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory)


class Packer:
    """Packs matrices with the workers of one context."""

    def __init__(self, library: ctypes.CDLL, context: int, quantization: Quantization | None, arena: Arena) -> None:
        self._library = library
        self._context = context
        self._kind = _KINDS[quantization]
        self._arena = arena

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """[N, K] bfloat16 and [N]."""
        n, k = weight.shape
        lanes = None if bias is None else _padded(bias, _PANEL_ROWS)
        return self._pack((weight,), n, k, lanes)

    def gate_up(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> PackedLinear:
        """[I, K] bfloat16 twice and [2 I]. A panel is 32 rows of the gate, then the same 32 of up."""
        if gate.shape != up.shape:
            raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} must have one shape")
        inner, k = gate.shape
        half = _PANEL_ROWS // 2
        lanes = None
        if bias is not None:
            lanes = torch.stack([_padded(part, half).view(-1, half) for part in bias.chunk(2)], dim=1).flatten()
        return self._pack((gate, up), 2 * inner, k, lanes)

    def _pack(self, sources: tuple[Tensor, ...], n: int, k: int, bias: Tensor | None) -> PackedLinear:
        for source in sources:
            if source.dtype != torch.bfloat16 or source.device.type != "cpu":
                raise ValueError(f"weights must be bfloat16 on the CPU, not {source.dtype} on {source.device}")
        if not 0 < k <= _MAX_K or n == 0:
            raise ValueError(f"a matrix of {n} x {k} cannot be packed; at most {_MAX_K} columns are possible")
        gate_up = len(sources) > 1
        args = LinearArgs(kind=self._kind, gate_up=int(gate_up), n=n, k=-(-k // _K_MULTIPLE) * _K_MULTIPLE, columns=k)
        address = ctypes.addressof(args)
        panels = self._library.quire_panel_count(address)
        sources = tuple(source.contiguous() for source in sources)
        operands = (self._context, address, sources[0].data_ptr(), sources[1].data_ptr() if gate_up else None)
        starts = torch.empty(panels + 1, dtype=torch.int64)
        args.starts = starts.data_ptr()
        if self._library.quire_lay_out(*operands):
            raise MemoryError("packing a weight matrix")
        memory = [self._arena.allocate(int(starts[-1])), starts]
        args.packed = memory[0].data_ptr()
        if self._kind != _KINDS[None]:
            scales = torch.empty(panels * _PANEL_ROWS, dtype=torch.float32)
            args.scales = scales.data_ptr()
            memory.append(scales)
        if self._kind == _KINDS["int8"]:
            sums = torch.empty(panels * _PANEL_ROWS, dtype=torch.int32)
            args.sums = sums.data_ptr()
            memory.append(sums)
        if bias is not None:
            args.bias = bias.data_ptr()
            memory.append(bias)
        if self._library.quire_pack(*operands):
            raise MemoryError("packing a weight matrix")
        return PackedLinear(address, n // 2 if gate_up else n, k, gate_up, args, tuple(memory))


def _padded(values: Tensor, multiple: int) -> Tensor:
    """As float32, with zeros up to a multiple of `multiple`."""
    padded = torch.zeros(-(-len(values) // multiple) * multiple, dtype=torch.float32)
    padded[: len(values)] = values
    return padded
