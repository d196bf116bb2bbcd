"""Packed weights in a file of memory: filled once, sealed, and mapped by every engine process that has its descriptor.

No process can change a sealed image, not even the one that filled it; an image that is not sealed is never read.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

HEADER_BYTES = 2 << 20
SECTION_BYTES = 8 << 20  # that one checksum is for
ALIGNMENT = 64
HUGE_PAGE = 2 << 20
_SMALL_PAGE = mmap.PAGESIZE
_MAGIC = b"quire packed 001"
_DIGEST_BYTES = 32
_TEXT_AT = len(_MAGIC) + 8 + _DIGEST_BYTES
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_HUGE_AT_ONCE = 16 << 20  # committed ahead of what is written
_SEAL_TRIES, _SEAL_PAUSE = 20, 0.05  # seconds
_PROT_NONE, _NORESERVE, _FIXED = 0, 0x4000, 0x10
_MADV_POPULATE_WRITE = 23  # Linux 5.14
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
Checksum = Callable[[int, int], int]  # of an address and a number of bytes


def new_memory() -> int:
    """The descriptor of an empty file of memory."""
    return os.memfd_create("quire-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class ImageWriter:
    """An image that is filled from its start to its end."""

    def __init__(self, fd: int, key: str, most_bytes: int, on_filled: Callable[[int], None]) -> None:
        """`most_bytes`: of all tensors. `on_filled` is called with the end of the filled part. Raises OSError."""
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
        """Report that everything allocated so far is filled."""
        self._on_filled(self._used)

    def put_matrix(self, place: str, facts: Mapping[str, int], parts: Mapping[str, Tensor]) -> None:
        """Record a matrix whose parts lie in memory from `allocate`."""
        self._header.facts[place] = dict(facts)
        self._header.parts[place] = {name: (self._offset(part), part.nbytes) for name, part in parts.items()}

    def seal(self, checksum: Checksum | None, threads: int) -> Header:
        """End the image; with `checksum` it can be kept in a file. Its tensors must not be used any more."""
        header = replace(self._header, num_bytes=_whole_pages(self._used))
        if checksum is not None:
            start = self._mapping.bytes.data_ptr()
            with ThreadPoolExecutor(threads, "weights") as pool:
                sums = pool.map(lambda part: checksum(start + part[0], part[1] - part[0]), header.sections())
                header = replace(header, checksums=tuple(sums))
        self._mapping.close()
        os.pwrite(self._fd, header.encode(), 0)
        os.ftruncate(self._fd, header.num_bytes)
        seal(self._fd)
        return header

    def close(self) -> None:
        """Abandon the image: it is not sealed, so nothing reads it."""
        self._mapping.close()

    def _offset(self, memory: Tensor) -> int:
        return memory.data_ptr() - self._mapping.bytes.data_ptr()

    def _commit(self, end: int) -> None:
        """Commit huge pages ahead of the writes: collapsing pages later would copy everything once more."""
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
        """Memory that the image takes."""
        return self.header.num_bytes

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor by its name. Raises BadHeader where there is none of such a kind."""
        if name not in self.header.tensors:
            raise BadHeader(f"it has no tensor {name}")
        offset, size, shape = self.header.tensors[name]
        if size != math.prod(shape) * dtype.itemsize:
            raise BadHeader(f"its tensor {name} takes {size} bytes")
        return self._bytes[offset : offset + size].view(dtype).view(shape)

    def has_matrix(self, place: str) -> bool:
        return place in self.header.facts

    def matrix(self, place: str) -> tuple[dict[str, int], dict[str, Tensor]]:
        """The facts and the parts of a matrix. Raises BadHeader where there is none."""
        if place not in self.header.parts or place not in self.header.facts:
            raise BadHeader(f"it has no matrix {place}")
        parts = self.header.parts[place].items()
        return self.header.facts[place], {name: self._bytes[at : at + size] for name, (at, size) in parts}


def seal(fd: int) -> None:
    """Make the memfd immutable, in content and length. Raises OSError where a writable mapping is left."""
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
    """Whether the memfd is sealed, so that it holds a finished image."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no file of memory
        return False


def open_image(fd: int, key: str) -> Image | None:
    """The image in a descriptor; None: there is none, or it is of another key."""
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


class BadHeader(ValueError):
    """A header that is not that of an image of this version; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """All that is known of an image beside its bytes. Offsets count from its beginning.

    An image's first bytes, the same in memory and in a file:

        magic, 16 bytes | length of the text, 8 | BLAKE2b-256 of the text, 32 | text: JSON | zeros up to HEADER_BYTES
    """

    key: str  # of what was packed, and into what
    num_bytes: int  # of the image, this header included
    tensors: dict[str, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)  # name: offset, bytes, shape
    facts: dict[str, dict[str, int]] = field(default_factory=dict)  # place of a matrix: as its kernel set tells them
    parts: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)  # place: name: offset, bytes
    checksums: tuple[int, ...] = ()  # of the sections behind the header; none: it was never meant for a file

    def encode(self) -> bytes:
        """HEADER_BYTES. Raises BadHeader if that is too few."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        if len(text) > HEADER_BYTES - _TEXT_AT:
            raise BadHeader(f"its list of contents takes {len(text)} bytes")
        digest = blake2b(text, digest_size=_DIGEST_BYTES).digest()
        return (_MAGIC + len(text).to_bytes(8, "little") + digest + text).ljust(HEADER_BYTES, b"\0")

    def sections(self) -> list[tuple[int, int]]:
        """The beginning and the end of each."""
        starts = range(HEADER_BYTES, self.num_bytes, SECTION_BYTES)
        return [(start, min(start + SECTION_BYTES, self.num_bytes)) for start in starts]


def decode_header(data: bytes) -> Header:
    """The header that `data` begins with. Raises BadHeader.

    One that decodes is whole, of this version, and places everything inside the image, at multiples of 64 bytes.
    """
    if len(data) < HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise BadHeader("it is not a file of packed weights, or one of another version")
    size = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 8], "little")
    text = data[_TEXT_AT : _TEXT_AT + size]
    digest = data[len(_MAGIC) + 8 : _TEXT_AT]
    damaged = blake2b(text, digest_size=_DIGEST_BYTES).digest() != digest
    if damaged or size > HEADER_BYTES - _TEXT_AT or data[_TEXT_AT + size : HEADER_BYTES].strip(b"\0"):
        raise BadHeader("its list of contents is damaged")
    try:
        header = _from_plain(json.loads(text))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadHeader(f"its list of contents is not understood: {error!r}") from None
    for offset, size in _places(header):
        if offset < HEADER_BYTES or size <= 0 or offset + size > header.num_bytes or offset % ALIGNMENT:
            raise BadHeader(f"its list of contents names {size} bytes at {offset} of {header.num_bytes}")
    if header.checksums and len(header.checksums) != len(header.sections()):
        raise BadHeader(f"it has {len(header.checksums)} checksums for {len(header.sections())} sections")
    return header


def _from_plain(plain: dict[str, Any]) -> Header:
    return Header(
        key=str(plain["key"]),
        num_bytes=int(plain["num_bytes"]),
        tensors={
            name: (int(at), int(size), tuple(int(n) for n in shape))
            for name, (at, size, shape) in plain["tensors"].items()
        },
        facts={place: {name: int(n) for name, n in facts.items()} for place, facts in plain["facts"].items()},
        parts={
            place: {name: (int(at), int(size)) for name, (at, size) in parts.items()}
            for place, parts in plain["parts"].items()
        },
        checksums=tuple(int(sum_) for sum_ in plain["checksums"]),
    )


def _places(header: Header) -> list[tuple[int, int]]:
    """Offset and bytes of everything."""
    found = [place for parts in header.parts.values() for place in parts.values()]
    return found + [(offset, size) for offset, size, _ in header.tensors.values()]


class MappedFile:
    """The first `num_bytes` of a file, as uint8. A multiple of a huge page; the file must be as long.

    On addresses where huge pages are possible; where the system has none for it, plain ones. Gone when its last tensor
    is. What was mapped read-only cannot be written.
    """

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
        """Commit [begin, end), multiples of a huge page, as huge pages. False: the system has none for it."""
        return all(commit_huge(self._start + at) for at in range(begin, end, HUGE_PAGE))

    def close(self) -> None:
        """Unmap now, and not with the last tensor; no tensor of it may be used afterwards."""
        self._unmap()


def commit_huge(address: int) -> bool:
    """Commit the huge page at an address of a file of memory; its contents stay. False: the system has none for it.

    One small page of it is committed first, since without any there is nothing to make a huge one of. The others are
    zeroed in place: of a huge page whose small ones are all there, each would be copied, at six times the cost.
    """
    ready = _libc.madvise(address, _SMALL_PAGE, _MADV_POPULATE_WRITE) == 0
    return ready and bool(_libc.madvise(address, HUGE_PAGE, _MADV_COLLAPSE) == 0)


def _map(address: int | None, num_bytes: int, protection: int, how: int, fd: int) -> int:
    found = _libc.mmap(address, num_bytes, protection, how, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {num_bytes} bytes: {os.strerror(number)}")
    return int(found)
