"""Zeroed memory on huge pages: large memory that is read all the time should not wait for its address translation.

Promises: pages are committed when they are first written; where the system has no huge pages, plain ones.
Must not know: what is kept there.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


def map_huge(num_bytes: int) -> Tensor:
    """A uint8 tensor [num_bytes or more] of zeros that begins on a huge page."""
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
