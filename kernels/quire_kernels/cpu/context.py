"""What the ops of one CPU kernel set share: their worker threads, and zeroed memory on huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from quire_kernels.cpu.topology import spread

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class Context:
    """The workers that the ops share. They end with the last op that holds this."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library = library
        cpus = spread(os.sched_getaffinity(0))
        # A pinned worker keeps its caches, and no two meet on a core. But where every hardware thread computes it also
        # shares its own with whoever is woken there, such as the server's other process: then the system had better
        # move it.
        pinned = (ctypes.c_int32 * threads)(*cpus[:threads]) if threads < len(cpus) else None
        handle = library.quire_create(threads, pinned)
        if not handle:
            raise MemoryError(f"starting {threads} worker threads")
        self.handle: int = handle
        weakref.finalize(self, library.quire_destroy, handle)


def map_huge(num_bytes: int) -> Tensor:
    """A uint8 tensor [num_bytes or more] of zeros that begins on a huge page, where the system has such.

    Large memory that is read all the time should not wait for its address translation. Pages are committed when they
    are first written.
    """
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :]


class Arena:
    """Hands out aligned memory from a few large mappings."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """A uint8 tensor [num_bytes], 64-byte aligned. It keeps its mapping alive."""
        needed = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if needed > len(self._free):
            self._free = map_huge(max(needed, _CHUNK_BYTES))
        memory, self._free = self._free[:num_bytes], self._free[needed:]
        return memory
