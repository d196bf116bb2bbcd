"""Background tasks that outlive their own exceptions: a round that fails is logged, and the next one begins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

PAUSE_SECONDS = 5.0  # between a failure and the next round

log = logging.getLogger("quire")


def begin(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Start a task that runs `work` until it returns or the task is cancelled, and again whenever it has raised."""
    return asyncio.create_task(_endure(work, name), name=name)


async def _endure(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    while True:
        try:
            await work()
        except Exception:
            log.exception("the task %s has failed; it begins anew in %g s", name, PAUSE_SECONDS)
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            return
