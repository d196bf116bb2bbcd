"""The shared parts of one CPU kernel set's ops: their worker threads, and zeroed memory on huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from quire_kernels.cpu.topology import spread
from quire_kernels.ranks import Collective

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class Context:
    """The workers that the ops share. They end with the last op that refers to this."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library = library
        cpus = spread(os.sched_getaffinity(0))
        # A pinned worker keeps its caches, and no two share a core. But where every hardware thread has a worker, a
        # pinned one also shares its core with threads that wake up there, such as those of the server process: then the
        # system should be free to move it.
        pinned = (ctypes.c_int32 * threads)(*cpus[:threads]) if threads < len(cpus) else None
        handle = library.quire_create(threads, pinned)
        if not handle:
            raise MemoryError(f"starting {threads} worker threads")
        self.handle: int = handle
        self.ranks: Collective | None = None  # that divide the products
        self.kept: object = None  # of theirs, what C++ calls
        weakref.finalize(self, library.quire_destroy, handle)

    @property
    def num_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.size


def map_huge(num_bytes: int) -> Tensor:
    """A uint8 tensor [num_bytes or more] of zeros that begins on a huge page, where the system has them.

    Large memory that is read all the time needs huge pages for fast address translation. Pages are committed by their
    first write.
    """
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :]


class Arena:
    """Allocates aligned memory from a few large mappings."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """A uint8 tensor [num_bytes], 64-byte aligned. It keeps its mapping alive."""
        needed = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if needed > len(self._free):
            self._free = map_huge(max(needed, _CHUNK_BYTES))
        memory, self._free = self._free[:num_bytes], self._free[needed:]
        return memory
