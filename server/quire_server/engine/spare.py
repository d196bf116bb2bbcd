"""The process that becomes the next engine, should one be needed: launched ahead, with its libraries loaded.

Owns that process until it is taken. Promises: it is made some time after it was asked for, when the engine's first
requests no longer need the cores; one that has ended meanwhile is not handed out; none is left behind.
Must not know: requests, why an engine is replaced.

Loading PyTorch is most of what a restart takes where the weights are still in memory. The libraries' pages are shared
with the engine's, so that waiting costs what one interpreter and its modules do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from quire_engine.errors import EngineDead
from quire_server.engine.process import EngineProcess

log = logging.getLogger("quire.supervisor")


class Spare:
    """At most one process that waits; for one event loop."""

    def __init__(self, launch: Callable[[], EngineProcess], seconds: float | None) -> None:
        """One is launched `seconds` after it was asked for; None: never."""
        self._launch = launch
        self._seconds = seconds
        self._process: EngineProcess | None = None
        self._timer: asyncio.TimerHandle | None = None

    def prepare(self) -> None:
        """Ask for one. Idempotent."""
        if self._seconds is not None and self._process is None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._make)

    def take(self) -> EngineProcess | None:
        """The caller's from now on. None: there is none."""
        self._stop_timer()
        process, self._process = self._process, None
        if process is None or process.runs:
            return process
        log.warning("the process that waited to be the next engine %s", process.ending)
        process.close()
        return None

    async def close(self) -> None:
        """End it. Idempotent."""
        self._stop_timer()
        process, self._process = self._process, None
        if process is not None:
            process.close()
            await process.reap(grace_seconds=0.0)

    def _make(self) -> None:
        self._timer = None
        try:
            self._process = self._launch()
        except EngineDead as error:
            log.warning("no process waits to be the next engine: %s", error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
