"""Blocks of host memory beside the pool, for a runner that is waited for.

Promises: bytes as they are, whatever the pool holds; done when `swap` returns. Must not know: who owns which block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire_engine.execution.kv_files import KVFiles

Pairs = Sequence[tuple[int, int]]  # (source, target) each

_MEASURED = 32  # blocks


class HostBlocks(Protocol):
    """What a runner does with the swaps of a batch; this one here, or the GPU's that copies beside the steps."""

    def swap(self, out: Pairs, into: Pairs, keys: Sequence[bytes] = ()) -> None:
        """Copy blocks of the pool to the host, then host blocks to the pool. No target comes twice in either.

        `keys`, of those that go out, are for the files.
        """
        ...

    def keep_in(self, directory: Path, layout: bytes) -> tuple[bytes, ...]:
        """Keep in files what goes out, and begin with what is in them: the keys of the first host blocks."""
        ...

    def forget(self, blocks: Sequence[int]) -> None:
        """Nobody will ask for what these host blocks hold: it leaves the files."""
        ...

    def seconds_per_block(self) -> float:
        """What one block's copy takes, measured. Call it before the first step."""
        ...


def block_rows(pool: Tensor) -> Tensor:
    """A pool's memory, [blocks, bytes] uint8: by the kernels' contract the first dimension is the block."""
    return pool.flatten(1).view(torch.uint8)


class HostKV:
    """See `HostBlocks`. The pool may lie on a device or on the host itself."""

    def __init__(self, pool: Tensor, num_blocks: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._pool = block_rows(pool)
        self._host = torch.zeros(num_blocks, self._pool.shape[1], dtype=torch.uint8)
        self._clock = clock
        self._files: KVFiles | None = None

    def keep_in(self, directory: Path, layout: bytes) -> tuple[bytes, ...]:
        self._files = KVFiles(directory, layout, num_bytes=self._host.shape[1], row=self._host.__getitem__)
        return self._files.load(len(self._host))

    def forget(self, blocks: Sequence[int]) -> None:
        if self._files is not None:
            self._files.forget(blocks)

    @torch.inference_mode()
    def swap(self, out: Pairs, into: Pairs, keys: Sequence[bytes] = ()) -> None:
        if out:
            blocks = [target for _, target in out]
            if self._files is not None:
                self._files.replace(blocks, keys)
            sources, targets = _columns(out)
            self._host[targets] = self._pool[sources.to(self._pool.device)].to(self._host.device)
            if self._files is not None:
                self._files.write(blocks, keys, _arrived)
        if into:
            sources, targets = _columns(into)
            self._pool[targets.to(self._pool.device)] = self._host[sources].to(self._pool.device)

    def seconds_per_block(self) -> float:
        """By copying the empty pool's zeros out and in again."""
        count = min(_MEASURED, len(self._pool), len(self._host))
        there = [(i, i) for i in range(count)]
        self.swap(there, there)  # the first time memory is taken
        started = self._clock()
        self.swap(there, there)
        return (self._clock() - started) / (2 * count)


def _arrived() -> None:
    pass


def _columns(pairs: Pairs) -> tuple[Tensor, Tensor]:
    indices = torch.tensor(pairs)  # [n, 2]
    return indices[:, 0], indices[:, 1]
