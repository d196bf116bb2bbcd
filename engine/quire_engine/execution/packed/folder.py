"""The folder in which images of packed weights are kept, a file each, by the key of what was packed.

Images are read from their files into memory here, and written to them.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple

from quire_engine.execution.packed.image import (
    HEADER_BYTES,
    HUGE_PAGE,
    BadHeader,
    Checksum,
    Header,
    MappedFile,
    decode_header,
    seal,
)
from quire_engine.execution.progress import Progress, Tell
from quire_engine.memory_plan import bytes_text
from quire_kernels.trusted_folder import UntrustedFolder, open_trusted, trusted

_SUFFIX, _UNFINISHED = ".packed", ".writing-"
_SPARE_SHARE = 0.02  # of the disk, which stays free
_AT_ONCE = 8 << 20
_PAUSE = 0.004  # seconds between two of them: the thread shares the memory and the cores with steps
_SYNCED_AT_ONCE = 256 << 20  # what the disk still has to take when all is written


class NoRoom(Exception):
    """A file cannot be kept here; the text says why."""


class Refused(Exception):
    """A file that is not used; the text says why."""


class _Kept(NamedTuple):
    used: float  # when it was last; seconds
    size: int
    path: Path


class PackedFolder:
    """A folder that `open_folder` has checked: no other user may write to it.

    The files together stay within a size limit, least recently used first to go; one process at a time writes.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def file(self, key: str) -> Path:
        """Return the path at which the image of a key is, or would be."""
        return self.path / (hashlib.sha256(key.encode()).hexdigest()[:32] + _SUFFIX)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A lock that one process holds at a time. Unfinished files of a killed process are removed. Raises OSError."""
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            for left in self.path.glob(_UNFINISHED + "*"):
                left.unlink(missing_ok=True)
            yield
        finally:
            os.close(handle)

    def unfinished(self, path: Path) -> Path:
        """The name of a file while it is written."""
        return self.path / f"{_UNFINISHED}{path.stem}"

    def make_room(self, num_bytes: int) -> None:
        """Remove the least recently used files until `num_bytes` fit. Raises NoRoom, having removed nothing."""
        if num_bytes > self._max_bytes:
            raise NoRoom(f"they take {bytes_text(num_bytes)}, --packed-cache allows {bytes_text(self._max_bytes)}")
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize - int(disk.f_blocks * disk.f_frsize * _SPARE_SHARE)
        kept = sorted(self._kept())
        total, going = sum(file.size for file in kept), 0
        remove: list[Path] = []
        for file in kept:
            if total - going + num_bytes <= self._max_bytes and free + going >= num_bytes:
                break
            going += file.size
            remove.append(file.path)
        if free + going < num_bytes:
            raise NoRoom(f"they take {bytes_text(num_bytes)}, the disk has {bytes_text(max(0, free))} to spare")
        for path in remove:
            path.unlink(missing_ok=True)
            say(f"removed {path}, the longest unused, to make room for other packed weights")

    def _kept(self) -> Iterator[_Kept]:
        for path in self.path.glob("*" + _SUFFIX):
            with suppress(OSError):
                status = path.lstat()
                yield _Kept(status.st_mtime, status.st_size, path)


def open_folder(directory: str, max_bytes: int) -> PackedFolder | None:
    """The folder, created if it is missing. None: it cannot be used, and a log line has said why."""
    try:
        return PackedFolder(trusted(Path(directory).expanduser()), max_bytes)
    except (UntrustedFolder, OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        say(f"packed weights are not kept for the next start: {error}; --packed-cache DIR names another folder")
        return None


def say(line: str) -> None:
    """Print one line to the operator, in the form of the kernels' compile messages."""
    print(f"quire: {line}", file=sys.stderr, flush=True)


def read_image(path: Path, key: str, fd: int, *, checksum: Checksum, threads: int, tell: Tell) -> None:
    """Fill and seal the file of memory `fd`, every byte checked on the way.

    The image is whole, of that key and from a file that only this user can write. The memory does not change when the
    file is removed or changed later. Raises Refused, FileNotFoundError; other OSErrors where memory is short.
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
        begin, end = section  # whole huge pages, so that no two threads touch the same one
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

    with ThreadPoolExecutor(threads, "weights") as pool:
        try:
            for _ in pool.map(read, header.sections(), header.checksums):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Stopped(Exception):
    """The image will not be finished."""


class FileWriter:
    """Writes one image to its file in a thread, behind the threads that fill the image.

    The file gets its name when it is whole and on the disk. Where it cannot be written, a log line says why and the
    start goes on.
    """

    def __init__(self, folder: PackedFolder, key: str, fd: int, most_bytes: int) -> None:
        """`fd`: of the image's memory. `most_bytes`: that it may come to."""
        self._folder, self._path = folder, folder.file(key)
        self._fd = os.dup(fd)
        self._most_bytes = most_bytes
        self._changed = Condition()  # guards the three below
        self._ready = HEADER_BYTES
        self._ended = False  # the image is whole, its header too
        self._stopped = False
        self._kept = False
        self._thread = Thread(target=self._work, name="packed weights", daemon=True)
        self._thread.start()

    def advance(self, ready: int) -> None:
        """The bytes before `ready` are final, except the header."""
        with self._changed:
            self._ready = max(self._ready, ready)
            self._changed.notify()

    def finish(self, num_bytes: int) -> None:
        """The image is sealed."""
        with self._changed:
            self._ready, self._ended = num_bytes, True
            self._changed.notify()

    def stop(self) -> None:
        """Abandon the file: the image will not be finished."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self.wait()

    def wait(self) -> Path | None:
        """Wait for the thread; the file, if it was written."""
        self._thread.join()
        return self._path if self._kept else None

    def _work(self) -> None:
        try:
            with self._folder.writing():
                if not self._path.exists():  # else another process has written it meanwhile
                    self._folder.make_room(self._most_bytes)
                    self._write(self._folder.unfinished(self._path))
                self._kept = True
        except _Stopped:
            pass
        except (NoRoom, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            say(f"the packed weights are not kept in {self._folder.path}: {reason}; the next start packs them again")
        except Exception as error:
            say(f"the packed weights are not kept in {self._folder.path}: {error!r}; the next start packs them again")
        finally:
            os.close(self._fd)

    def _write(self, temporary: Path) -> None:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.lseek(handle, HEADER_BYTES, os.SEEK_SET)
            num_bytes = self._follow(handle)
            os.pwrite(handle, os.pread(self._fd, HEADER_BYTES, 0), 0)
            os.fsync(handle)
            temporary.rename(self._path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(handle)
        self._sync_folder()
        say(f"the packed weights are kept in {self._path} ({bytes_text(num_bytes)}) for the next start")

    def _follow(self, handle: int) -> int:
        """Copy all behind the header as it gets ready; the image's size."""
        at = synced = HEADER_BYTES
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready > at or self._ended or self._stopped)  # noqa: B023
                ready, ended, stopped = self._ready, self._ended, self._stopped
            if stopped:
                raise _Stopped
            if at == ready and ended:
                return at
            at += os.sendfile(handle, self._fd, at, min(ready - at, _AT_ONCE))
            if at - synced >= _SYNCED_AT_ONCE:
                os.fdatasync(handle)
                synced = at
            time.sleep(_PAUSE)

    def _sync_folder(self) -> None:
        """The new name, too, survives a loss of power."""
        handle = os.open(self._folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
