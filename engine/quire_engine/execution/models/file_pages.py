"""The pages of a mapped file that this process holds, and how it lets go of them.

Promises: memory that is not that file's mapping is never touched, whatever address is named; what was let go of is read
again when it is looked at. Must not know: tensors, what is in the file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FilePages:
    """Of one file, which somebody else has mapped by the time that `release` is first called."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ranges: list[tuple[int, int]] | None = None

    def release(self, address: int, num_bytes: int) -> None:
        """Let go of the whole pages in [address, address + num_bytes), if the file is mapped there."""
        if self._ranges is None:
            self._ranges = _mapped(self._path)
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(begin <= first and last <= end for begin, end in self._ranges):
            _libc.madvise(first, last - first, mmap.MADV_DONTNEED)


def _mapped(path: Path) -> list[tuple[int, int]]:
    """Where the file is mapped in this process. Nothing where the system does not tell."""
    found: list[tuple[int, int]] = []
    with suppress(OSError):
        status = path.stat()
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "
        for line in _MAPS.read_text(errors="replace").splitlines():
            if wanted in line:
                begin, end = line.split(" ", 1)[0].split("-")
                found.append((int(begin, 16), int(end, 16)))
    return found
