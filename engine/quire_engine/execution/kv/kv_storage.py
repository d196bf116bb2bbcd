"""The memory of keys and values: the KV pool, blocks of host memory beside it, and files for those."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.kv_groups import KVHeads, KVLayout, KVPart, kv_layout, one_group
from quire_engine.execution.kv.block_files import BlockFiles
from quire_engine.execution.kv.pool_rows import BlockForm, HeadRows, PoolRows, bytes_of, mapped
from quire_engine.execution.models.found import FoundModel, is_bidirectional
from quire_engine.execution.models.served import ModelFacts
from quire_engine.execution.models.weights import pool_parts
from quire_engine.ranks import heads_of_rank
from quire_kernels.kernel_set import KernelSet, PoolPart

_log = logging.getLogger(__name__)
Pairs = Sequence[tuple[int, int]]  # (source, target) each
_MEASURED = 32  # blocks
_MOST_WAITING = 256  # blocks to write; more are left out


def block_bytes(
    kernels: KernelSet, config: ModelFacts, block_size: int, dtype: torch.dtype, layout: KVLayout | None = None
) -> int:
    """Bytes of one block; of all layers where no layout is given."""
    sizes = _PoolSizes.of(kernels, layout or one_group(config.kv_heads), block_size, dtype)
    return sizes.num_layers * sizes.layer_bytes


def pool_blocks(
    config: EngineConfig, found: FoundModel, kernels: KernelSet, dtype: torch.dtype, device: torch.device
) -> tuple[KVLayout, int, BlockForm]:
    """Return the layout of a rank's keys and values, a block's bytes in all ranks, and its form elsewhere."""
    ranks, size = config.tensor_parallel_size, config.limits.block_size
    shares = ranks if found.divides_heads(ranks) else 1
    own, whole = (_layout(config, found.facts, device, each) for each in (shares, 1))
    of_rank, of_one = (block_bytes(kernels, found.facts, size, dtype, each) for each in (own, whole))
    return own, of_rank * ranks, block_form(kernels, size, dtype, of_one, own=own, whole=whole)


def _layout(config: EngineConfig, model: ModelFacts, device: torch.device, head_ranks: int) -> KVLayout:
    """Return the pool's layout; windows let go of blocks on a CPU alone, without swaps, for a causal model.

    Swaps copy whole sequences, a GPU's graphs have one table of blocks, and a bidirectional model reads all of a
    prompt's blocks in its only step.
    """
    heads = heads_of_rank(model.kv_heads, head_ranks)
    if device.type != "cpu" or config.swap_space or is_bidirectional(model):
        return one_group(heads)
    return kv_layout(heads, model.windows, model.max_position_embeddings)


def block_form(  # noqa: PLR0917 - what a block is made of
    kernels: KernelSet, block_size: int, dtype: torch.dtype, num_bytes: int, own: KVLayout, whole: KVLayout
) -> BlockForm:
    """A block as one process has it, `num_bytes` of all heads. `own`: the layout of a rank's pool.

    Without parts where a rank's blocks have other layers than that one's, or not all blocks the same kinds of heads.
    """
    if own == whole:  # of one process, or every rank has all heads
        return BlockForm(num_bytes, (HeadRows(1, 1, num_bytes),))
    layers = [[part.num_layers for part in layout.parts] for layout in (own, whole)]
    is_share = (own.windows, own.places, layers[0]) == (whole.windows, whole.places, layers[1])
    if not is_share or (len(whole.windows) > 1 and len(whole.parts) > 1):
        return BlockForm(num_bytes, ())

    def head_bytes(part: KVPart) -> int:
        return kernels.kv_block_bytes(1, 1, block_size, part.heads.width, dtype)

    parts = tuple([HeadRows(part.num_layers, part.heads.number, head_bytes(part)) for part in whole.parts])
    return BlockForm(num_bytes, parts)


class _PoolSizes(NamedTuple):
    """A pool as `KernelSet.new_kv` makes it: for the heads of its first part, with room for all parts."""

    heads: KVHeads
    num_layers: int
    layer_bytes: int

    @classmethod
    def of(cls, kernels: KernelSet, layout: KVLayout, block_size: int, dtype: torch.dtype) -> _PoolSizes:
        def num_bytes(part: PoolPart) -> int:
            return kernels.kv_block_bytes(part.num_layers, part.num_kv_heads, block_size, part.head_dim, dtype)

        parts, heads = pool_parts(layout), layout.parts[0].heads
        layer_bytes = num_bytes(parts[0]._replace(num_layers=1))
        most = max(sum(map(num_bytes, part.before)) + num_bytes(part) for part in parts)
        if len(parts) == 1:
            return cls(heads, parts[0].num_layers, num_bytes(parts[0]) // parts[0].num_layers)
        return cls(heads, -(-most // layer_bytes), layer_bytes)


class KVStorage:
    """All blocks' keys and values. `tensor` is what the model's ops take.

    Allocated once, zeroed; the layout is the kernel set's, the block its first dimension.
    """

    def __init__(  # noqa: PLR0917 - what a pool is made of
        self,
        kernels: KernelSet,
        config: ModelFacts,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        layout: KVLayout | None = None,
        on_copy: Callable[[Pairs], None] | None = None,
        memory_fd: int | None = None,
        memory: Tensor | None = None,
    ) -> None:
        """`layout`: None: all of the model's layers in one group. `on_copy` is called before each copy.

        `memory_fd`: a file of memory that is to be the pool, of its size, for other processes to map.
        `memory`: uint8 on the host, of exactly the pool's bytes, which keep what is in them.
        """
        self._copy, self._on_copy = kernels.copy_blocks, on_copy
        sizes = _PoolSizes.of(kernels, layout or one_group(config.kv_heads), block_size, dtype)
        heads = sizes.heads

        def new_kv(count: int) -> Tensor:
            return kernels.new_kv(count, sizes.num_layers, heads.number, block_size, heads.width, dtype, device)

        if memory_fd is not None:
            memory = mapped(memory_fd, (num_blocks, new_kv(1).nbytes))
        if memory is None:
            self.tensor = new_kv(num_blocks)
        else:
            of_none = new_kv(0)  # for the shape of a block
            self.tensor = memory.view(of_none.dtype).view(num_blocks, *of_none.shape[1:])

    @torch.inference_mode()
    def copy_blocks(self, pairs: Pairs) -> None:
        """Copy whole blocks, (source, target) each; all sources are read before any target is written."""
        if not pairs:
            return
        if self._on_copy is not None:
            self._on_copy(pairs)
        if self._copy is not None:
            self._copy(self.tensor, pairs)
            return
        indices = torch.tensor(pairs, device=self.tensor.device)  # [n, 2]
        self.tensor[indices[:, 1]] = self.tensor[indices[:, 0]]


class KVBlocks(Protocol):
    """The part of `KVStorage` that a batch's copies use."""

    @property
    def tensor(self) -> Tensor: ...
    def copy_blocks(self, pairs: Pairs) -> None: ...


class HostBlocks(Protocol):
    """The host's side of swaps: `HostKV`, or the GPU's, which copies beside the steps."""

    def swap(self, out: Pairs, into: Pairs, keys: Sequence[bytes] = ()) -> None:
        """Copy blocks of the pool to the host, then host blocks to the pool. No target comes twice in either.

        `keys`, of those that go out, are for the files.
        """
        ...

    def keep_in(self, directory: Path, layout: bytes) -> tuple[bytes, ...]:
        """Keep in files what goes out, and begin with what is in them: the keys of the first host blocks."""
        ...

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop the content of these host blocks from the files."""
        ...

    def seconds_per_block(self) -> float:
        """Measure the seconds that one block's copy takes. Call it before the first step."""
        ...


class HostKV:
    """See `HostBlocks`. The pool may lie on a device or on the host itself. A swap is done when `swap` returns."""

    def __init__(self, pool: PoolRows, num_blocks: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._pool = pool
        self._host = torch.zeros(num_blocks, pool.num_bytes, dtype=torch.uint8)
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
            self._pool.copy_to(self._host, *_columns(out))
            if self._files is not None:
                self._files.write(blocks, keys, _arrived)
        if into:
            self._pool.copy_from(self._host, *_columns(into))

    def seconds_per_block(self) -> float:
        """Measure the seconds of a block's copy, by copying the empty pool's zeros out and in again."""
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


class KVFiles:
    """Host blocks in files, by the hash of their content, so that the prefixes of one run are there in the next.

    There are no more files than host blocks. A thread writes, and what comes faster than the disk takes it is not
    written. See `BlockFiles` for what is trusted.
    """

    def __init__(self, directory: Path, layout: bytes, *, num_bytes: int, row: Callable[[int], Tensor]) -> None:
        """`layout`: all that the bytes depend on beside the tokens. `row(i)`: the host block, [num_bytes] uint8.

        Raises ConfigError for a directory that cannot be trusted or is in use.
        """
        self._files = BlockFiles(directory, layout, num_bytes=num_bytes)
        self._row = row
        self._changed = Condition()  # guards all below
        self._key_of: dict[int, bytes] = {}  # host block -> what it holds, or will when it has arrived
        self._block_of: dict[bytes, int] = {}
        self._writes: deque[tuple[int, bytes, Callable[[], None]]] = deque()
        self._removals: deque[bytes] = deque()
        self._idle = True
        self._broken, self._closed = bool(self._files.why_unwritable), False
        Thread(target=self._work, name="kv files", daemon=True).start()

    def load(self, num_blocks: int) -> tuple[bytes, ...]:
        """Fill host blocks 0, 1, ... from files, the newest if there are too many; returns their keys, oldest first."""
        found = [key for key, _ in self._files.found()]
        surplus = max(0, len(found) - num_blocks)
        keys: list[bytes] = []
        bad = 0
        for key in found[surplus:]:
            payload = self._files.read(key)
            if payload is None:
                bad += 1
                self._files.remove(key)
                continue
            bytes_of(self._row(len(keys)))[:] = payload
            self._key_of[len(keys)], self._block_of[key] = key, len(keys)
            keys.append(key)
        for key in found[:surplus]:
            self._files.remove(key)
        if bad:
            _log.warning("%s: %d files of KV blocks were damaged or foreign, and are gone", self._files.folder, bad)
        _log.info("%s: %d KV blocks of earlier runs", self._files.folder, len(keys))
        return tuple(keys)

    def replace(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Host blocks are about to get other contents: call it before they are copied to. An empty key names none."""
        with self._changed:  # at most for as long as one block is copied
            for block, key in zip(blocks, keys, strict=True):
                old = self._key_of.pop(block, b"")
                if old and self._block_of.get(old) == block:
                    del self._block_of[old]
                    self._removals.append(old)
                if key:
                    self._key_of[block], self._block_of[key] = key, block

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop the content of these host blocks: their files are removed."""
        self.replace(blocks, (b"",) * len(blocks))
        with self._changed:
            self._changed.notify()

    def write(self, blocks: Sequence[int], keys: Sequence[bytes], wait: Callable[[], None]) -> None:
        """Queue blocks to be written to files, unless replaced before; their contents are there when `wait` returns."""
        with self._changed:
            for block, key in zip(blocks, keys, strict=True):
                if key and len(self._writes) < _MOST_WAITING and not self._broken:
                    self._writes.append((block, key, wait))
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, and let another server have the directory."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle and not self._writes and not self._removals)
            self._closed = True
            self._changed.notify_all()
        self._files.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._writes or self._removals or self._closed)
                if self._closed:
                    return
                self._idle = False
                removals, self._removals = self._removals, deque()
                task = self._writes.popleft() if self._writes else None
            try:
                for key in removals:
                    if key not in self._block_of:
                        self._files.remove(key)
                if task is not None:
                    self._write(*task)
            except Exception as error:  # the server serves without files as well
                with self._changed:
                    self._broken = True
                    self._writes.clear()
                _log.error("%s: KV blocks are written no more: %s", self._files.folder, error)

    def _write(self, block: int, key: bytes, wait: Callable[[], None]) -> None:
        wait()
        with self._changed:
            if self._key_of.get(block) != key:
                return
            payload = bytes(bytes_of(self._row(block)))
        self._files.write(key, payload)
