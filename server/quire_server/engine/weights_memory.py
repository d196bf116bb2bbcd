"""Memory that one engine process fills with packed weights and the next one finds them in.

Owns the descriptor. Promises: what an engine left unfinished is not shown to the next; nothing of it is left when it is
closed. Must not know: what is in it, processes.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress


class WeightsMemory:
    """One file of memory after another; a sealed one stays."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def for_next_engine(self) -> int | None:
        """The descriptor to hand on, empty or sealed. None: this system has no such files, each engine loads anew."""
        if self._fd is not None and not _is_sealed(self._fd):
            self.close()
        if self._fd is None:
            with suppress(OSError, AttributeError):
                self._fd = os.memfd_create("quire-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        return self._fd

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back, once no engine has it mapped. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_sealed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
