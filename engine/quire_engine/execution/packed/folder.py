"""The folder in which images of packed weights are kept, a file each, by the key of what was packed.

Promises: only a folder that is ours alone is used; files together stay within a size, the longest unused go first; one
process at a time writes. Must not know: what is in a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from quire_engine.memory_plan import bytes_text
from quire_kernels.trusted_folder import UntrustedFolder, trusted

_SUFFIX, _UNFINISHED = ".packed", ".writing-"
_SPARE_SHARE = 0.02  # of the disk, which stays free


class NoRoom(Exception):
    """A file cannot be kept here; the text says why."""


def say(line: str) -> None:
    """One line to the operator, as the kernels have them when they are compiled."""
    print(f"quire: {line}", file=sys.stderr, flush=True)


class _Kept(NamedTuple):
    used: float  # when it was last; seconds
    size: int
    path: Path


class PackedFolder:
    """A folder that `open_folder` found fit."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def file(self, key: str) -> Path:
        """Where the image of a key is, or would be."""
        return self.path / (hashlib.sha256(key.encode()).hexdigest()[:32] + _SUFFIX)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Held by one process at a time, others wait; what a killed one left unfinished is removed. Raises OSError."""
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
        """Remove what was unused for longest, as far as it must be. Raises NoRoom, with everything still there."""
        if num_bytes > self._max_bytes:
            raise NoRoom(f"they take {bytes_text(num_bytes)}, --packed-cache-size allows {bytes_text(self._max_bytes)}")
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
    """The folder, made where it is missing. None: it cannot be used, and a line has said why."""
    try:
        return PackedFolder(trusted(Path(directory).expanduser()), max_bytes)
    except (UntrustedFolder, OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        say(f"packed weights are not kept for the next start: {error}; --packed-cache-dir names another folder")
        return None
