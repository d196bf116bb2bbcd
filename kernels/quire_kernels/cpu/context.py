"""The shared parts of one CPU kernel set's ops: worker threads, the way of fetching, zeroed memory on huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from typing import get_args

import torch
from torch import Tensor

from quire_kernels.cpu.topology import spread
from quire_kernels.cpu.variants import cpu_vendor
from quire_kernels.kernel_set import Fetch
from quire_kernels.ranks import Collective

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
FETCHES: tuple[Fetch, ...] = get_args(Fetch)  # in the order of `Fetch` in kernels/csrc/simd/prefetch.h
# Hygon's processors are AMD's first Zen under another name.
_PAST_CACHES = frozenset({"AuthenticAMD", "HygonGenuine"})


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
        self.fetch(fetch_for(cpu_vendor()))

    def fetch(self, where: Fetch) -> None:
        """Set where the next ops fetch what is read once."""
        self.library.quire_fetch(self.handle, FETCHES.index(where))

    @property
    def num_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.size


def fetch_for(vendor: str) -> Fetch:
    """Return where CPUs of a maker, by CPUID's name of it, fetch what is read once; empty: the CPU is not of x86.

    On AMD's, the non-temporal hint leaves the caches to what the rest of the machine works with, at no loss. On
    Intel's it stalls: lines come through the few buffers of the first-level cache, which are full when a core reads
    all that it can. Other makers' are not measured: what that hint does is each maker's own, while the second level
    is where all of them already fetch the panel that follows. On ARM neither is measured, and the first one stays.
    """
    return "past caches" if not vendor or vendor in _PAST_CACHES else "second level"


def fetch_text(fetch: Fetch, vendor: str) -> str:
    """The choice for operators."""
    where = "past the caches" if fetch == "past caches" else "to the second-level cache"
    return f"fetches weights {where}" + (f", as for {vendor}" if vendor else "")


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
