"""Ranks of one machine: the exchange of columns through shared memory, called from within the C++ ops.

Promises: a wait for another rank ends when its process does, or after a bound. Must not know: the engine.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quire_kernels.cpu.context import Context
from quire_kernels.ranks import Collective, RankLost

PATIENCE_SECONDS = 120.0  # without progress of another rank whose process lives
_PACKET_BYTES = 4096  # of a message that need not be cut, its length included
_LENGTH_BYTES = 8
_RANK_LOST = 3  # `kRankLost`
_GATHER = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)


def new_exchange(library: ctypes.CDLL, size: int) -> int:
    """The descriptor of a file of memory through which so many ranks exchange columns. Raises OSError."""
    fd = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, library.quire_ranks_bytes(size))
    return fd


class SharedMemory:
    """See `Collective`: through a file of memory that all ranks of a machine have."""

    def __init__(
        self, library: ctypes.CDLL, fd: int, rank: int, size: int, *, patience: float = PATIENCE_SECONDS
    ) -> None:
        """`fd`: from `new_exchange`; it may be closed afterwards. Raises ValueError where it is none for `size`."""
        handle = library.quire_ranks_open(fd, rank, size, patience)
        if not handle:
            raise ValueError(f"there is no memory through which rank {rank} of {size} could exchange columns")
        self.rank, self.size, self.library = rank, size, library
        self.handle: int = handle
        weakref.finalize(self, library.quire_ranks_close, handle)

    def gather(self, data: Tensor, starts: Sequence[int]) -> None:
        if data.dtype is not torch.uint8 or data.dim() != 2 or not data.is_contiguous() or len(starts) != self.size + 1:
            raise ValueError(f"columns of {self.size} ranks are gathered in contiguous uint8 [rows, bytes]")
        if sorted(starts) != list(starts) or starts[0] != 0 or starts[-1] != data.shape[1]:
            raise ValueError(f"the columns of {self.size} ranks must be all {data.shape[1]} of a row, in order")
        self._gather(data.data_ptr(), len(data), data.shape[1], starts)

    def broadcast(self, data: bytes | None) -> bytes:
        if (data is None) != (self.rank > 0):
            raise ValueError("rank 0 alone gives what is broadcast")
        packet = bytearray(_PACKET_BYTES)
        if data is None:
            raise_for_lost(self.library.quire_ranks_await(self.handle))
        else:
            begin = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _PACKET_BYTES - _LENGTH_BYTES]
            packet[: len(begin)] = begin
        self._send(packet)
        size = int.from_bytes(packet[:_LENGTH_BYTES], "little")
        if size <= _PACKET_BYTES - _LENGTH_BYTES:
            return bytes(packet[_LENGTH_BYTES : _LENGTH_BYTES + size]) if data is None else data
        whole = bytearray(size) if data is None else bytearray(data)
        self._send(whole)
        return bytes(whole) if data is None else data

    def waited(self) -> tuple[float, ...]:
        nanoseconds = (ctypes.c_int64 * self.size)()
        self.library.quire_ranks_waited(self.handle, nanoseconds)
        return tuple([each / 1e9 for each in nanoseconds])

    def _send(self, data: bytearray) -> None:
        """Rank 0's bytes to the others."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        self._gather(address, 1, len(data), [0, *[len(data)] * self.size])

    def _gather(self, address: int, rows: int, row_bytes: int, starts: Sequence[int]) -> None:
        places = (ctypes.c_int64 * len(starts))(*starts)
        raise_for_lost(self.library.quire_ranks_gather(self.handle, address, rows, row_bytes, places))


def raise_for_lost(failed: int) -> None:
    """Raises RankLost where a C++ function has found that another rank is lost."""
    if failed == _RANK_LOST:
        raise RankLost("another rank of the model has ended or stopped")


def join(context: Context, collective: Collective) -> None:
    """Divide the products of a context's ops among these ranks, from now on."""
    if isinstance(collective, SharedMemory):
        function = ctypes.cast(collective.library.quire_ranks_gather, ctypes.c_void_p)
        context.library.quire_join(context.handle, collective.rank, collective.size, function, collective.handle)
        context.ranks = collective
        return
    called = _GATHER(partial(_gathered, collective))
    function = ctypes.cast(called, ctypes.c_void_p)
    context.library.quire_join(context.handle, collective.rank, collective.size, function, None)
    context.ranks, context.kept = collective, called


def join_columns(context: Context, own: Tensor) -> Tensor:
    """See `KernelSet`. Raises RankLost."""
    ranks = context.ranks
    if ranks is None:
        return own
    rows, columns = own.shape
    whole = own.new_empty(rows, ranks.size * columns)
    whole[:, ranks.rank * columns : (ranks.rank + 1) * columns] = own
    if whole.numel():
        part = columns * own.itemsize
        ranks.gather(whole.view(torch.uint8), [each * part for each in range(ranks.size + 1)])
    return whole


def _gathered(collective: Collective, _: int, address: int, rows: int, row_bytes: int, starts: int) -> int:
    """An exchange that is written in Python, as C++ calls it."""
    try:
        places = list((ctypes.c_int64 * (collective.size + 1)).from_address(starts))
        memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(address)
        if rows and row_bytes:
            collective.gather(torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes), places)
    except RankLost:
        return _RANK_LOST
    return 0
