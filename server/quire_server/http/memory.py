"""Returns memory that the process has freed to the system after large requests.

Promises: at rest the process is about as large as before; the event loop does not wait for it; where the C library
cannot do it, nothing is done.

The C library keeps freed memory for reuse; after a request of many megabytes that is most of the process. glibc's
`malloc_trim` returns whole free pages, also from the middle of its heaps.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize

SECONDS = 2.0  # between two checks
GROWTH_BYTES = 24 << 20  # growth that is worth a trim
_STILL_BYTES = 4 << 20  # a process that grows by less between two checks is at rest

log = logging.getLogger("quire.memory")


class MemoryReturn:
    """Checks the process's size periodically and trims it."""

    def __init__(
        self,
        on_given_back: Callable[[int], None],
        *,
        resident: Callable[[], int] | None = None,
        trim: Callable[[], None] | None = None,
    ) -> None:
        """`on_given_back` is called with the number of bytes of each trim."""
        self._on_given_back = on_given_back
        self._resident = resident or resident_bytes
        self._trim = trim or _library_trim()
        self._least = self._last = self._resident()

    async def run(self) -> None:
        """Check until cancelled."""
        while self._trim is not None:
            await asyncio.sleep(SECONDS)
            await self.look()

    async def look(self) -> None:
        """Trim if the process has grown and is at rest."""
        now, before = self._resident(), self._last
        self._last = now
        self._least = min(self._least, now)
        if self._trim is None or now < self._least + GROWTH_BYTES or now > before + _STILL_BYTES:
            return
        await asyncio.to_thread(self._trim)
        # The remaining memory is in use: only growth above it leads to the next trim.
        self._least = self._last = self._resident()
        given = now - self._least
        if given > 0:
            self._on_given_back(given)
            log.debug("gave %d MiB back to the system, %d MiB are left", given >> 20, self._least >> 20)


def resident_bytes() -> int:
    """The resident memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _library_trim() -> Callable[[], None] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return lambda: trim(0)
