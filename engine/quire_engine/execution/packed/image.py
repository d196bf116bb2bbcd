"""Packed weights in a file of memory: filled once, sealed, and mapped by every engine process that has its descriptor.

Promises: nobody can change a sealed image, the process that filled it included; one that is not sealed is never read.
Must not know: checkpoints, folders, what a matrix is for.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from quire_engine.execution.packed.header import ALIGNMENT, HEADER_BYTES, BadHeader, Header, decode_header
from quire_engine.execution.packed.mapping import HUGE_PAGE, MappedFile

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_HUGE_AT_ONCE = 16 << 20  # committed ahead of what is written
_SEAL_TRIES, _SEAL_PAUSE = 20, 0.05  # seconds

Checksum = Callable[[int, int], int]  # of an address and a number of bytes


def new_memory() -> int:
    """The descriptor of an empty file of memory."""
    return os.memfd_create("quire-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class ImageWriter:
    """An image that is being filled, from its beginning on."""

    def __init__(self, fd: int, key: str, most_bytes: int, on_filled: Callable[[int], None]) -> None:
        """`most_bytes`: of all that will be put in. `on_filled`: told up to where. Raises OSError."""
        self._fd, self._on_filled = fd, on_filled
        self._capacity = _whole_pages(HEADER_BYTES + most_bytes)
        os.ftruncate(fd, 0)
        os.ftruncate(fd, self._capacity)  # takes nothing until it is written to
        self._mapping = MappedFile(fd, self._capacity, writable=True)
        self._header = Header(key=key, num_bytes=0)
        self._huge_to = 0  # as far as huge pages were asked for
        self._used = HEADER_BYTES

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeroed and aligned."""
        end = self._used + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if end > self._capacity:
            raise MemoryError(f"an image of {self._capacity} bytes is full")
        if self._huge_to < end:
            self._commit(end)
        memory = self._mapping.bytes[self._used : self._used + num_bytes]
        self._used = end
        return memory

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros for a tensor of that name, to be filled."""
        memory = self.allocate(math.prod(shape) * dtype.itemsize)
        self._header.tensors[name] = self._offset(memory), memory.nbytes, shape
        return memory.view(dtype).view(shape)

    def tell_used(self) -> None:
        """All that was allocated so far is filled."""
        self._on_filled(self._used)

    def put_matrix(self, place: str, facts: Mapping[str, int], parts: Mapping[str, Tensor]) -> None:
        """A matrix whose parts `allocate` gave the memory for."""
        self._header.facts[place] = dict(facts)
        self._header.parts[place] = {name: (self._offset(part), part.nbytes) for name, part in parts.items()}

    def seal(self, checksum: Checksum | None, threads: int) -> Header:
        """End it; with `checksum`, so that it can be read from a file. None of its tensors may be used any more."""
        header = replace(self._header, num_bytes=_whole_pages(self._used))
        if checksum is not None:
            start = self._mapping.bytes.data_ptr()
            with ThreadPoolExecutor(threads) as pool:
                sums = pool.map(lambda part: checksum(start + part[0], part[1] - part[0]), header.sections())
                header = replace(header, checksums=tuple(sums))
        self._mapping.close()
        os.pwrite(self._fd, header.encode(), 0)
        os.ftruncate(self._fd, header.num_bytes)
        seal(self._fd)
        return header

    def close(self) -> None:
        """Give up: it is not sealed, and so never read."""
        self._mapping.close()

    def _offset(self, memory: Tensor) -> int:
        return memory.data_ptr() - self._mapping.bytes.data_ptr()

    def _commit(self, end: int) -> None:
        """Huge pages from the start: collapsed later, everything would be copied once more."""
        until = min(_whole_pages(max(end, self._huge_to + _HUGE_AT_ONCE)), self._capacity)
        # Where the system has none, it is not asked again.
        self._huge_to = until if self._mapping.make_huge(self._huge_to, until) else self._capacity


class Image:
    """A sealed image. Its tensors are read-only, and stay when the descriptor is closed."""

    def __init__(self, fd: int, header: Header) -> None:
        """Raises OSError."""
        self.header = header
        self._bytes = MappedFile(fd, header.num_bytes, writable=False).bytes

    @property
    def num_bytes(self) -> int:
        """Of memory that it takes."""
        return self.header.num_bytes

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor by its name. Raises BadHeader where there is none of such a kind."""
        if name not in self.header.tensors:
            raise BadHeader(f"it has no tensor {name}")
        offset, size, shape = self.header.tensors[name]
        if size != math.prod(shape) * dtype.itemsize:
            raise BadHeader(f"its tensor {name} takes {size} bytes")
        return self._bytes[offset : offset + size].view(dtype).view(shape)

    def matrix(self, place: str) -> tuple[dict[str, int], dict[str, Tensor]]:
        """The facts and the parts of a matrix. Raises BadHeader where there is none."""
        if place not in self.header.parts or place not in self.header.facts:
            raise BadHeader(f"it has no matrix {place}")
        parts = self.header.parts[place].items()
        return self.header.facts[place], {name: self._bytes[at : at + size] for name, (at, size) in parts}


def seal(fd: int) -> None:
    """From now on nobody can write to it or change its length. Raises OSError where a writable mapping is left."""
    for patience in range(_SEAL_TRIES):
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except OSError as error:  # a page of it is on its way into a file
            if error.errno != errno.EBUSY or patience == _SEAL_TRIES - 1:
                raise
            time.sleep(_SEAL_PAUSE)
        else:
            return


def is_sealed(fd: int) -> bool:
    """Whether it holds an image that was ended and cannot be changed."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no file of memory
        return False


def open_image(fd: int, key: str) -> Image | None:
    """The image in a descriptor, if it is one, whole and of this key."""
    if not is_sealed(fd):
        return None
    try:
        header = decode_header(os.pread(fd, HEADER_BYTES, 0))
        if header.key != key or os.fstat(fd).st_size != header.num_bytes:
            return None
        return Image(fd, header)
    except (BadHeader, OSError):
        return None


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
