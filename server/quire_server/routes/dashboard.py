"""GET /dashboard/events: the dashboard's data, second by second, as server-sent events.

The last ten minutes come first, then a message per second, until a stopping server has no requests left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.errors import QueueFull
from quire_server.http.sse import EventStream, error_frames
from quire_server.showing.version import VERSION
from quire_server.state import ServerState, state_of

router = APIRouter(include_in_schema=False)

MOST_VIEWERS = 32
_RETRY_SECONDS = 10.0


@router.get("/dashboard/events")
async def follow(request: Request) -> Response:
    feed: Feed = request.app.state.feed
    if feed.num_listeners >= MOST_VIEWERS:
        raise QueueFull(
            f"{MOST_VIEWERS} dashboards are open on this server, which is the limit.",
            retry_after_seconds=_RETRY_SECONDS,
        )
    viewing = _Viewing(state_of(request), feed)
    return EventStream(
        viewing.messages(),
        _frame,
        progress=viewing,
        failure=error_frames,
        headers={"x-content-type-options": "nosniff"},
        keep_alive_seconds=0.0,
    )


def _frame(message: bytes) -> bytes:
    return b"data: " + message + b"\n\n"


class _Viewing:
    """An open dashboard page: sends the last ten minutes first, then a message a second.

    The stream ends when a stopping server has no requests left.
    """

    def __init__(self, state: ServerState, feed: Feed) -> None:
        self.finished = False
        self._state = state
        self._feed = feed

    async def messages(self) -> AsyncGenerator[bytes]:
        self._feed.num_listeners += 1
        try:
            yield (
                b'{"server":'
                + msgspec.json.encode(self._about())
                + b',"past":'
                + self._state.metrics.history.past()
                + b"}"
            )
            while not self.finished:
                news = await self._feed.next()
                self.finished = self._state.stopping and self._state.client.in_flight == 0
                yield b'{"now":' + news + b"}"
        finally:
            self._feed.num_listeners -= 1

    def _about(self) -> dict[str, object]:
        plan = self._state.whole_plan
        limits = plan.scheduler.limits
        return {
            "started": self._state.started,  # a new value after a reconnection means a new server
            "version": VERSION,
            "model": self._state.model_names[0],
            "device": plan.machine.device,
            "dtype": plan.model.dtype,
            "max_model_len": plan.scheduler.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "block_size": limits.block_size,
            "num_blocks": plan.scheduler.num_blocks,
            "bytes_per_block": plan.pool.bytes_per_block,
        }


class Feed:
    """The latest message, and a wait for the next one. Used on the event loop's thread.

    Messages are not queued: a slow listener gets the latest message when it reads again.
    """

    def __init__(self) -> None:
        self.num_listeners = 0
        self._latest = b""
        self._news = asyncio.Event()

    def publish(self, message: bytes) -> None:
        """Wake all listeners with this message."""
        self._latest = message
        self._news.set()
        self._news = asyncio.Event()

    async def next(self) -> bytes:
        """Wait for the next message; a slow listener may get a later one."""
        await self._news.wait()
        return self._latest
