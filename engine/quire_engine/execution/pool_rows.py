"""The blocks of a KV pool as rows of bytes. Of several ranks each has a pool, and a part of every block.

Promises: a row has the parts of one block in the order of the pools. Must not know: requests.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

import torch
from torch import Tensor


class PoolRows:
    """The rows of one or more pools of equally many blocks."""

    def __init__(self, *pools: Tensor) -> None:
        """`pools`: [blocks, ...] each."""
        self._parts = [block_rows(pool) for pool in pools]
        widths = [part.shape[1] for part in self._parts]
        self._columns = [slice(*each) for each in pairwise(accumulate(widths, initial=0))]
        self.num_bytes = sum(widths)  # of a row

    def __len__(self) -> int:
        return len(self._parts[0])

    def content(self, block: int) -> bytes:
        """A copy of a block that is in host memory."""
        return b"".join([bytes_of(part[block]) for part in self._parts])

    def place(self, payload: bytes | bytearray, block: int) -> None:
        """Copy what `content` gave into a block in host memory."""
        for part, columns in zip(self._parts, self._columns, strict=True):
            bytes_of(part[block])[:] = memoryview(payload)[columns]

    def copy_to(self, host: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks, [n] int64, into these rows of `host` [rows, num_bytes] uint8."""
        for part, columns in zip(self._parts, self._columns, strict=True):
            host[targets, columns] = part[sources.to(part.device)].to(host.device)

    def copy_from(self, host: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy these rows of `host` into blocks."""
        for part, columns in zip(self._parts, self._columns, strict=True):
            part[targets.to(part.device)] = host[sources, columns].to(part.device)


def block_rows(pool: Tensor) -> Tensor:
    """A pool's memory, [blocks, bytes] uint8: by the kernels' contract the first dimension is the block."""
    return pool.flatten(1).view(torch.uint8)


def bytes_of(row: Tensor) -> memoryview:
    """The memory of a row of uint8 on the host."""
    return memoryview((ctypes.c_char * row.numel()).from_address(row.data_ptr())).cast("B")


def mapped(fd: int, sizes: Sequence[int]) -> Tensor:
    """The memory of a file, uint8 of these sizes, shared with all who map it. The descriptor may be closed."""
    memory = mmap.mmap(fd, torch.Size(sizes).numel(), flags=mmap.MAP_SHARED)
    with suppress(OSError):  # a kernel without huge pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(*sizes)
