"""KV blocks in files by the hash of their tokens: one file a block, in a directory that can be trusted.

Promises: a file is read only if it is whole and of this checkpoint and layout; a file appears under its name when it is
written to its end. Must not know: torch, the scheduler.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import tempfile
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from quire_engine.contract.errors import ConfigError
from quire_kernels.trusted_folder import open_trusted, trusted

_log = logging.getLogger(__name__)
_MAGIC = b"quire kv block 1"
HEADER_BYTES = len(_MAGIC) + sha256().digest_size
_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_PATIENCE = 3.0  # seconds until another process counts as one that stays
_NO_WRITES = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)


class BlockFiles:
    """The files of one layout, in a folder of their own that one engine process has to itself.

    The content of files becomes a part of answers: a directory that others may write to is refused.
    """

    def __init__(self, directory: Path, layout: bytes, *, num_bytes: int, places: int = 1) -> None:
        """`layout`: all that the bytes depend on beside the tokens; `num_bytes`: of a block.

        `places`: engines of one server that have a folder each in this directory. Raises ConfigError for a directory
        that cannot be trusted, or whose folders are all in use. Where nothing can be written, `why_unwritable` says so.
        """
        self.why_unwritable = ""
        self._num_bytes = num_bytes
        self._layout = sha256(layout).digest()
        self.folder = directory / self._layout.hex()[:16]
        self._lock: int | None = None
        try:
            _make_private(directory)
            self.folder, self._lock = _first_free(self.folder, places)
        except _UnwritableError as error:
            self.why_unwritable = str(error)
        if self.why_unwritable:
            _log.warning("%s: KV blocks are read and not written: %s", self.folder, self.why_unwritable)

    def found(self) -> list[tuple[bytes, int]]:
        """The keys of the files that are there, with the times of their last use in ns, the longest unused first."""
        files: list[tuple[int, str]] = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    files.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
        return [(bytes.fromhex(name.removesuffix(".kv")), used) for used, name in sorted(files)]

    def read(self, key: bytes) -> bytes | None:
        """The block, if there is a file of ours for it that is whole."""
        try:
            with os.fdopen(open_trusted(self._path(key)), "rb") as file:
                if os.fstat(file.fileno()).st_size != HEADER_BYTES + self._num_bytes:
                    return None
                header, payload = file.read(HEADER_BYTES), file.read(self._num_bytes)
        except OSError:
            return None
        return payload if header == _MAGIC + self._digest(key, payload) else None

    def write(self, key: bytes, payload: bytes, *, used: int | None = None) -> None:
        """Write the block's file; `used`: the time of its last use in ns, None: now. Raises OSError."""
        handle, name = tempfile.mkstemp(dir=self.folder, prefix="new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC)
                file.write(self._digest(key, payload))
                file.write(payload)
            if used is not None:
                os.utime(name, ns=(used, used))
            os.replace(name, self._path(key))
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            raise

    def touch(self, key: bytes, used: int) -> None:
        """The block was last used at this time, in ns."""
        with suppress(OSError):
            os.utime(self._path(key), ns=(used, used), follow_symlinks=False)

    def remove(self, key: bytes) -> None:
        with suppress(OSError):  # none is there, or something that is not ours
            self._path(key).unlink()

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _digest(self, key: bytes, payload: bytes) -> bytes:
        digest = sha256(self._layout + key)
        digest.update(payload)
        return digest.digest()

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.kv"


class _UnwritableError(Exception):
    """The disk is full or may only be read."""


def _make_private(directory: Path) -> None:
    """Make a directory that only we may write to, or see that it is one. Raises ConfigError, _UnwritableError."""
    try:
        trusted(directory)
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        if cause.errno in _NO_WRITES:
            raise _UnwritableError(str(error)) from None
        raise ConfigError(
            f"kv_offload_dir={directory} must be a directory of the server's own user that nobody else may write to,"
            f" since what is read from it becomes a part of answers: {error}"
        ) from None


def _first_free(folder: Path, places: int) -> tuple[Path, int]:
    """The first of an engine's folders that no process has, and a descriptor that keeps others out of it while this
    process lives. Raises ConfigError, _UnwritableError."""
    folders = [folder if place == 0 else folder.with_name(f"{folder.name}-{place}") for place in range(places)]
    deadline = time.monotonic() + _PATIENCE
    while True:
        for here in folders:
            _make_private(here)
            handle = _locked(here)
            if handle is not None:
                return here, handle
        if time.monotonic() > deadline:
            raise ConfigError(f"kv_offload_dir={folder} is in use by another server; name one for each")
        time.sleep(0.05)  # an engine whose server was killed takes a moment to end


def _locked(folder: Path) -> int | None:
    """None: another process has the folder."""
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NO_WRITES:
            raise _UnwritableError(f"{folder}: {error.strerror}") from None
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    for left in folder.glob("new-*"):  # of a process that was killed
        with suppress(OSError):
            left.unlink()
    return handle
