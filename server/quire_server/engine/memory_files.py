"""Files of memory that outlive an engine process: packed weights, and the KV pool, for the next one.

Promises: only the server's own processes get at them, since they have no name; they are gone with the server.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress


class _MemoryFile:
    """A memory file, made when it is first asked for."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory, once no engine has it mapped. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class WeightsMemory(_MemoryFile):
    """A memory file that one engine process fills with packed weights for the next ones.

    A sealed file is kept. A file that an engine left unfinished is replaced.
    """

    def for_next_engine(self) -> int | None:
        """The descriptor of a sealed or empty file. None: the system has no memory files, so each engine loads anew."""
        if self._fd is not None and not _is_sealed(self._fd):
            self.close()
        if self._fd is None:
            self._fd = _new_file("quire-weights")
        return self._fd

    @property
    def is_filled(self) -> bool:
        """Whether the next engine takes its weights from here."""
        return self._fd is not None and _is_sealed(self._fd)


class PoolMemory(_MemoryFile):
    """A memory file that has the KV pool of one engine process after another, with a record of what is in it.

    The engine checks whether the record is for its model and settings; its holder decides whether it may be believed.
    """

    def for_next_engine(self) -> int | None:
        """The descriptor; None: the system has no memory files, so what a crash takes is computed again."""
        if self._fd is None:
            self._fd = _new_file("quire-kv-pool")
        return self._fd

    def distrust(self) -> None:
        """The process that had it has failed by itself, and may have written anything: the next one begins empty."""
        if self._fd is not None:
            size = min(_NAME_BYTES, os.fstat(self._fd).st_size)
            os.pwrite(self._fd, bytes(size), 0)


_NAME_BYTES = 64  # the file's first bytes, without which an engine believes nothing in it


def _new_file(name: str) -> int | None:
    with suppress(OSError, AttributeError):
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)  # for who finds it among a process's descriptors
        return fd
    return None


def _is_sealed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
