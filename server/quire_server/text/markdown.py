"""Makes HTML of the markdown that models write, in a process that can be killed.

Promises: the event loop is never held up, whatever the texts; the HTML is safe to show (see `markdown_worker`). No
process is started before the first text.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import anyio.to_thread
from anyio import CapacityLimiter

from quire_server.errors import BadRequest, NotReady
from quire_server.text.worker_process import ProcessDied, WorkerProcess

MOST_TEXTS = 64  # of one call
MOST_CHARS = 1 << 16  # of the texts of one call together
_MEMORY_BYTES = 1 << 29
_TIME_LIMIT = 3.0  # seconds for the texts of one call; the largest plain ones take about one
_PATIENCE = 2.0  # seconds that a call waits for its turn


class MarkdownRenderer:
    """One process that renders one call after the other, for one event loop."""

    def __init__(self, *, time_limit: float = _TIME_LIMIT) -> None:
        """`time_limit`: seconds for the texts of one call."""
        script = Path(__file__).with_name("markdown_worker.py")
        self.process = WorkerProcess(script, {}, time_limit=time_limit, memory_bytes=_MEMORY_BYTES)
        self._close = weakref.finalize(self, self.process.stop)
        self._turn = asyncio.Lock()
        self._thread: CapacityLimiter | None = None

    async def render(self, texts: Sequence[str]) -> list[str]:
        """The HTML of each text. Raises BadRequest for texts beyond the limits, and NotReady."""
        if len(texts) > MOST_TEXTS or sum(map(len, texts)) > MOST_CHARS:
            raise BadRequest(
                f"At most {MOST_TEXTS} texts of {MOST_CHARS:,} characters together are rendered at once.",
                param="texts",
                code="text_too_long",
            )
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._turn.acquire()
        except TimeoutError:
            raise NotReady("Other answers are being rendered.", retry_after_seconds=1, code="text_queue_full") from None
        if self._thread is None:
            self._thread = CapacityLimiter(1)
        asking = asyncio.ensure_future(anyio.to_thread.run_sync(self._ask, texts, limiter=self._thread))
        asking.add_done_callback(self._ended)  # when its thread has finished, not when its client has gone
        try:
            answer = await asyncio.shield(asking)
        except ProcessDied:
            raise _beyond_limits() from None
        if "html" not in answer:
            raise _beyond_limits()
        return cast(list[str], answer["html"])

    def close(self) -> None:
        """End the process; also done when the object or the interpreter goes away."""
        self._close()

    def _ask(self, texts: Sequence[str]) -> dict[str, object]:
        return self.process.ask(json.dumps({"texts": texts}))

    def _ended(self, asking: asyncio.Future[dict[str, object]]) -> None:
        self._turn.release()
        if not asking.cancelled():
            asking.exception()  # mark the exception as retrieved


def _beyond_limits() -> BadRequest:
    return BadRequest("The text cannot be rendered within this server's limits.", param="texts", code="text_too_long")
