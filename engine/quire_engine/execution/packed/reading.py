"""An image from its file into memory, every byte checked on the way.

Promises: what is read is whole and of the key that was asked for, from a file of our own, or it is refused with the
reason; the file may be removed or changed meanwhile or later, memory does not follow it. Must not know: what is in it.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire_engine.execution.packed.header import HEADER_BYTES, BadHeader, Header, decode_header
from quire_engine.execution.packed.image import Checksum, seal
from quire_engine.execution.packed.mapping import HUGE_PAGE, MappedFile
from quire_engine.execution.progress import Progress, Tell
from quire_kernels.trusted_folder import UntrustedFolder, open_trusted


class Refused(Exception):
    """A file that is not used; the text says why."""


def read_image(path: Path, key: str, fd: int, *, checksum: Checksum, threads: int, tell: Tell) -> None:
    """Fill and seal the file of memory `fd`.

    Raises Refused, FileNotFoundError; other OSErrors where memory is short.
    """
    try:
        handle = open_trusted(path)
    except UntrustedFolder as error:
        raise Refused(str(error)) from None
    try:
        start = os.pread(handle, HEADER_BYTES, 0)
        header = _header(start, os.fstat(handle).st_size, key)
        os.ftruncate(fd, 0)
        os.ftruncate(fd, header.num_bytes)
        mapping = MappedFile(fd, header.num_bytes, writable=True)
        try:
            _copy(handle, mapping, header, checksum=checksum, threads=threads, tell=tell)
        finally:
            mapping.close()
        os.pwrite(fd, start, 0)  # as it was checked, not as it may be now
        seal(fd)
        os.utime(handle)  # used now
    finally:
        os.close(handle)


def _header(data: bytes, num_bytes: int, key: str) -> Header:
    try:
        header = decode_header(data)
    except BadHeader as error:
        raise Refused(str(error)) from None
    if header.num_bytes != num_bytes or num_bytes % HUGE_PAGE:
        raise Refused(f"it has {num_bytes} bytes of {header.num_bytes}")
    if header.key != key:
        raise Refused("it is of other weights")
    if not header.checksums:
        raise Refused("it has no checksums")
    return header


def _copy(handle: int, mapping: MappedFile, header: Header, *, checksum: Checksum, threads: int, tell: Tell) -> None:
    start = mapping.bytes.data_ptr()
    progress = Progress("reading packed weights", header.num_bytes - HEADER_BYTES, tell)

    def read(section: tuple[int, int], expected: int) -> None:
        begin, end = section  # on huge pages, so that no two threads ask for the same one
        size = end - begin
        mapping.make_huge(begin, end)
        into = memoryview((ctypes.c_char * size).from_address(start + begin)).cast("B")
        done = 0
        while done < size:
            count = os.preadv(handle, [into[done:]], begin + done)
            if count == 0:
                raise Refused("it became shorter while it was read")
            done += count
        if checksum(start + begin, size) != expected:
            raise Refused(f"the bytes from {begin} to {end} are damaged")
        progress.add(size)

    with ThreadPoolExecutor(threads) as pool:
        try:
            for _ in pool.map(read, header.sections(), header.checksums):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
