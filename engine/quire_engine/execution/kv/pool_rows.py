"""The blocks of a KV pool as rows of bytes. Of several ranks each has a pool, and a part of every block.

Promises: where a block's bytes are known head by head, a row is what one process's pool would have there, whatever the
number of pools. Must not know: requests.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.ranks import Rank


class HeadRows(NamedTuple):
    """A part of a block whose heads are alike: their bytes lie layer after layer, in a layer head after head."""

    num_layers: int
    num_heads: int
    head_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.num_heads * self.head_bytes


class BlockForm(NamedTuple):
    """A block as one process's pool has it. Behind the parts there may be padding."""

    num_bytes: int
    parts: tuple[HeadRows, ...]  # none: what ranks have of it are not its heads


class PoolRows:
    """The rows of one or more pools of equally many blocks, of ranks 0, 1, ..."""

    def __init__(self, *pools: Tensor, form: BlockForm | None = None) -> None:
        """`pools`: [blocks, ...] each. `form`: without its parts a row has what each pool has, in the pools' order."""
        self._pools = [block_rows(pool) for pool in pools]
        width = self._pools[0].shape[1]
        if form is None or not form.parts or len(pools) == 1:
            form = BlockForm(len(pools) * width, (HeadRows(1, len(pools), width),))
        self.num_bytes, self._parts = form  # of a row
        self._whole = len(pools) == 1  # a row is what the pool has
        self._shares = [list(self._shares_of(Rank(rank, len(pools)))) for rank in range(len(pools))]

    def _shares_of(self, rank: Rank) -> Iterator[tuple[slice, slice, tuple[int, int, int], slice]]:
        """Yield each part's bytes in a row and in the rank's pool, its shape in a row, and the rank's heads of it."""
        at = own_at = 0
        for part in self._parts:
            heads = rank.heads(part.num_heads)
            size = part.num_layers * (heads.stop - heads.start) * part.head_bytes
            yield slice(at, at + part.num_bytes), slice(own_at, own_at + size), part, heads
            at, own_at = at + part.num_bytes, own_at + size

    def __len__(self) -> int:
        return len(self._pools[0])

    def content(self, block: int) -> bytes:
        """A copy of a block that is in host memory."""
        if self._whole:
            return bytes(bytes_of(self._pools[0][block]))
        row = torch.zeros(1, self.num_bytes, dtype=torch.uint8)
        self.copy_to(row, torch.tensor([block]), torch.tensor([0]))
        return bytes(bytes_of(row[0]))

    def place(self, payload: bytes | bytearray, block: int) -> None:
        """Copy what `content` gave into a block in host memory."""
        if self._whole:
            bytes_of(self._pools[0][block])[:] = payload
            return
        row = torch.frombuffer(bytearray(payload), dtype=torch.uint8)[None]
        self.copy_from(row, torch.tensor([0]), torch.tensor([block]))

    def copy_to(self, host: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks, [n] int64, into these rows of `host` [rows, num_bytes] uint8."""
        if self._whole:
            host[targets] = self._pools[0][sources.to(self._pools[0].device)].to(host.device)
            return
        for pool, shares in zip(self._pools, self._shares, strict=True):
            found = pool[sources]
            for columns, own, shape, heads in shares:
                rows = torch.unflatten(host[:, columns], 1, shape)[:, :, heads]
                rows[targets] = torch.unflatten(found[:, own], 1, (shape[0], -1, shape[2]))

    def copy_from(self, host: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy these rows of `host` into blocks."""
        if self._whole:
            pool = self._pools[0]
            pool[targets.to(pool.device)] = host[sources].to(pool.device)
            return
        for pool, shares in zip(self._pools, self._shares, strict=True):
            for columns, own, shape, heads in shares:
                rows = torch.unflatten(host[:, columns], 1, shape)[:, :, heads]
                pool[targets, own] = rows[sources].flatten(1)


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
