"""Memory that the process has freed and still holds, given back to the system after large work.

Promises: at rest the process is about as large as before; the event loop does not wait for it; where the C library
cannot do it, nothing is done.

The C library keeps what is freed for later; after a request of many megabytes that is most of the process. Its
`malloc_trim` (glibc's) gives whole free pages back, in the middle of its heaps too.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize

SECONDS = 2.0  # between two looks
GROWTH_BYTES = 24 << 20  # worth giving back
_STILL_BYTES = 4 << 20  # by less than this the process grows in a moment of rest

log = logging.getLogger("quire.memory")


class MemoryReturn:
    """Looks at the process's size now and then."""

    def __init__(
        self,
        on_given_back: Callable[[int], None],
        *,
        resident: Callable[[], int] | None = None,
        trim: Callable[[], None] | None = None,
    ) -> None:
        """`on_given_back` is told how many bytes each time."""
        self._on_given_back = on_given_back
        self._resident = resident or resident_bytes
        self._trim = trim or _library_trim()
        self._least = self._last = self._resident()

    async def run(self) -> None:
        """Until cancelled."""
        while self._trim is not None:
            await asyncio.sleep(SECONDS)
            await self.look()

    async def look(self) -> None:
        """Gives memory back where the process has grown and does not grow any more."""
        now, before = self._resident(), self._last
        self._last = now
        self._least = min(self._least, now)
        if self._trim is None or now < self._least + GROWTH_BYTES or now > before + _STILL_BYTES:
            return
        await asyncio.to_thread(self._trim)
        # What is still there is used: only what comes on top of it is looked at again.
        self._least = self._last = self._resident()
        given = now - self._least
        if given > 0:
            self._on_given_back(given)
            log.debug("gave %d MiB back to the system, %d MiB are left", given >> 20, self._least >> 20)


def resident_bytes() -> int:
    """Of this process's memory, what is in RAM; 0 where the system does not say."""
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
