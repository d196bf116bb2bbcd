"""The pool of worker threads that the ops of one CPU kernel set share.

Promises: the workers live as long as an op that holds them, and end with the last one.
Must not know: tensors, what the workers compute.
"""

from __future__ import annotations

import ctypes
import os
import weakref

from quire_kernels.cpu.topology import spread


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
