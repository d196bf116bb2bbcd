"""A file of memory, mapped: on addresses where huge pages are possible, and gone when its last tensor is.

Promises: what was mapped read-only cannot be written; where the system has no huge pages for it, plain ones.
Must not know: what is kept there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_PROT_NONE, _NORESERVE, _FIXED = 0, 0x4000, 0x10
_MADV_COLLAPSE = 25  # Linux 6.1: huge pages at once, also where the system gives none by itself
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFile:
    """The first `num_bytes` of a file, as uint8. A multiple of a huge page; the file must be as long."""

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        """Raises OSError."""
        if num_bytes <= 0 or num_bytes % HUGE_PAGE:
            raise ValueError(f"{num_bytes} bytes are not a number of huge pages")
        # Room for moving the beginning to where a huge page may begin; what is left over is given back.
        room = _map(None, num_bytes + HUGE_PAGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
        self._start = -(-room // HUGE_PAGE) * HUGE_PAGE
        before, after = self._start - room, room + HUGE_PAGE - self._start
        _libc.munmap(room, before) if before else None
        _libc.munmap(self._start + num_bytes, after) if after else None
        # Private where it is only read: older kernels refuse to share a file that is sealed against writing.
        how = (mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE) | _FIXED
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            _map(self._start, num_bytes, protection, how, fd)
        except OSError:
            _libc.munmap(self._start, num_bytes)
            raise
        memory = (ctypes.c_uint8 * num_bytes).from_address(self._start)
        self._unmap = weakref.finalize(memory, _libc.munmap, self._start, num_bytes)
        self.bytes: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        _libc.madvise(self._start, num_bytes, mmap.MADV_HUGEPAGE)  # refused: plain pages

    def make_huge(self, begin: int, end: int) -> bool:
        """Commit [begin, end), multiples of a huge page, as huge pages of zeros. False: the system has none for it."""
        self.bytes[begin:end:HUGE_PAGE] = 0  # a page that nobody has touched is not made a huge one
        return bool(_libc.madvise(self._start + begin, end - begin, _MADV_COLLAPSE) == 0)

    def close(self) -> None:
        """Now, and not with the last tensor: nobody may look at one after this."""
        self._unmap()


def _map(address: int | None, num_bytes: int, protection: int, how: int, fd: int) -> int:
    found = _libc.mmap(address, num_bytes, protection, how, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {num_bytes} bytes: {os.strerror(number)}")
    return int(found)
