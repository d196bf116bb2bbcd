"""Swapping beside the steps: blocks are copied to pinned host memory and back in a stream of their own.

Owns the host's blocks and the staging blocks at the pool's end. Promises: a step finds the pool as if its swaps
had been done before it, one after the other; the host waits for none.

A block that goes out is copied to a staging block first, inside the device, so that the step may write to it at once;
the slow copy from there to the host runs while the step does. A block that comes in is on its way while the step before
is computed, and is put in its place by a copy inside the device when that one is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from quire_engine.execution.gpu.device import Device, Event
from quire_engine.execution.kv.kv_storage import KVBlocks, KVFiles, Pairs
from quire_engine.execution.kv.pool_rows import block_rows

STAGING_BYTES = 16 << 20  # of each of the four stages; more than that at once goes in turns
_STAGES = 4  # two in each direction: one is filled while the other is emptied
_SLAB_BYTES = 256 << 20  # pinned memory comes in powers of two: this much at a time wastes little


def staging_blocks(bytes_per_block: int, num_host_blocks: int) -> int:
    """Blocks that the pool needs beyond the others."""
    return _STAGES * min(max(1, STAGING_BYTES // bytes_per_block), num_host_blocks)


@dataclass(slots=True)
class _Stage:
    """Neighbouring blocks of the pool that only swaps use."""

    first: int
    emptied: Event | None = None  # when they may be written again


class StreamedKV:
    """See `HostBlocks`. Called inside the device's work."""

    def __init__(self, kv: KVBlocks, device: Device, *, first_staging: int, num_blocks: int) -> None:
        self._kv, self._device, self._lane = kv, device, device.lane()
        self._rows = block_rows(kv.tensor)
        self._num_blocks = num_blocks
        self._files: KVFiles | None = None
        num_bytes = self._rows.shape[1]
        self._size = staging_blocks(num_bytes, num_blocks) // _STAGES
        stages = [_Stage(first_staging + i * self._size) for i in range(_STAGES)]
        self._leaving, self._coming = stages[:2], stages[2:]
        self._per_slab = min(num_blocks, max(1, _SLAB_BYTES // num_bytes))
        self._slabs = [
            device.host_buffer(min(self._per_slab, num_blocks - first) * num_bytes).tensor.view(-1, num_bytes)
            for first in range(0, num_blocks, self._per_slab)
        ]

    def keep_in(self, directory: Path, layout: bytes) -> tuple[bytes, ...]:
        self._files = KVFiles(directory, layout, num_bytes=self._rows.shape[1], row=self._host_row)
        return self._files.load(self._num_blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        if self._files is not None:
            self._files.forget(blocks)

    def swap(self, out: Pairs, into: Pairs, keys: Sequence[bytes] = ()) -> None:
        blocks = [target for _, target in out]
        if self._files is not None and out:
            self._files.replace(blocks, keys)
        self._swap(out, into)
        if self._files is not None and out:
            self._files.write(blocks, keys, self._lane.record().wait)

    def _swap(self, out: Pairs, into: Pairs) -> None:
        written = {target for _, target in out}
        # What goes out in this step and comes in with it comes behind it, and so does what does not fit the stages:
        # there the copies in wait for what is behind the copies out.
        if len(into) > 2 * self._size or any(source in written for source, _ in into):
            self._move_out(out)
            for pairs in self._chunks(into):
                self._place(pairs, self._bring(pairs))
            return
        coming = [(pairs, self._bring(pairs)) for pairs in self._chunks(into)]
        self._move_out(out)
        for pairs, stage_and_event in coming:
            self._place(pairs, stage_and_event)

    def seconds_per_block(self) -> float:
        """Measure the seconds of a block's copy, by copying a stage out and in again with nothing beside it."""
        count = min(self._size, self._per_slab)
        seconds = 0.0
        for _ in range(2):  # the first time is not counted
            started = time.perf_counter()
            stage = self._rows[self._leaving[0].first :][:count]
            self._lane.fetch(stage, self._slabs[0][:count])
            self._lane.send(self._slabs[0][:count], stage)
            self._lane.record().wait()
            seconds = time.perf_counter() - started
        return seconds / (2 * count)

    def _host_row(self, block: int) -> Tensor:
        slab, at = divmod(block, self._per_slab)
        return self._slabs[slab][at]

    def _chunks(self, pairs: Pairs) -> Iterator[Pairs]:
        for start in range(0, len(pairs), self._size):
            yield pairs[start : start + self._size]

    def _move_out(self, out: Pairs) -> None:
        for pairs in self._chunks(out):
            stage = self._next(self._leaving)
            if stage.emptied is not None:
                self._device.follow(stage.emptied)
            self._kv.copy_blocks([(source, stage.first + i) for i, (source, _) in enumerate(pairs)])
            self._lane.follow(self._device.record())
            for staged, held in self._runs(stage.first, [target for _, target in pairs]):
                self._lane.fetch(staged, held)
            stage.emptied = self._lane.record()

    def _bring(self, pairs: Pairs) -> tuple[_Stage, Event]:
        stage = self._next(self._coming)
        if stage.emptied is not None:
            self._lane.follow(stage.emptied)
        for staged, held in self._runs(stage.first, [source for source, _ in pairs]):
            self._lane.send(held, staged)
        return stage, self._lane.record()

    def _place(self, pairs: Pairs, coming: tuple[_Stage, Event]) -> None:
        stage, arrived = coming
        self._device.follow(arrived)
        self._kv.copy_blocks([(stage.first + i, target) for i, (_, target) in enumerate(pairs)])
        stage.emptied = self._device.record()

    @staticmethod
    def _next(stages: list[_Stage]) -> _Stage:
        """The one that was used longest ago."""
        stages.append(stages.pop(0))
        return stages[-1]

    def _runs(self, first: int, blocks: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Stage and host memory, as few pieces as possible: the stage's blocks from `first` on are neighbours."""
        start = 0
        for end in range(1, len(blocks) + 1):
            block = blocks[start]
            slab, at = divmod(block, self._per_slab)
            if end < len(blocks) and blocks[end] == block + end - start and blocks[end] // self._per_slab == slab:
                continue
            count = end - start
            yield self._rows[first + start : first + end], self._slabs[slab][at : at + count]
            start = end
