"""Server-sent events over a bare ASGI reply.

Promises: no status before the first frame, so that early errors are HTTP errors; later ones are sent in-band; the
items' generator is closed when the client leaves, and not asked for more while it does not read.
Must not know: what the frames say, how long a client may take to read them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from quire_server.errors import ApiError, ClientGone, error_body, internal_error
from quire_server.http.disconnect import until_disconnect

Item = TypeVar("Item")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

log = logging.getLogger("quire.sse")


class Progress(Protocol):
    """What knows whether there is more to come; a plain attribute, since it is asked for every token."""

    @property
    def finished(self) -> bool: ...


class EventStream(Response, Generic[Item]):
    """Sends each item, as the whole frames that `encode` makes of it, with one write.

    The stream ends with the item after whose encoding `progress` has finished; `failure` makes the frames with which a
    stream ends that has begun and cannot go on.
    `keep_alive_seconds`: `keep_alive` after so much silence; it also sends the status, so that errors after it are
    in-band. 0 is never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        items: AsyncGenerator[Item],
        encode: Callable[[Item], bytes],
        *,
        progress: Progress,
        failure: Callable[[ApiError], bytes],
        headers: Mapping[str, str],
        keep_alive_seconds: float,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._items = items
        self._encode = encode
        self._progress = progress
        self._failure = failure
        self._keep_alive_seconds = keep_alive_seconds
        self._sign_of_life = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        wire = _Wire(send, self.raw_headers)
        writing = asyncio.create_task(self._write(wire))
        leaving = asyncio.create_task(until_disconnect(receive))
        tasks = [writing, leaving]
        if self._keep_alive_seconds:
            tasks.append(asyncio.create_task(self._keep_alive(wire)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if not writing.done() and not wire.is_started:
                raise ClientGone
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, wire: _Wire) -> None:
        async with aclosing(self._items) as items:
            try:
                async for item in items:
                    chunk = self._encode(item)
                    is_last = self._progress.finished
                    if chunk or is_last:
                        await wire.write(chunk, is_last=is_last)
            except ApiError as error:
                if not wire.is_started:
                    raise
                await wire.write(self._failure(error), is_last=True)
            except Exception:
                if not wire.is_started:
                    raise
                log.exception("a stream failed")
                await wire.write(self._failure(internal_error()), is_last=True)

    async def _keep_alive(self, wire: _Wire) -> None:
        """Writes signs of life into a silent stream."""
        period = self._keep_alive_seconds
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(wire.changed_at + period - loop.time(), period / 8))
            if not wire.is_writing and loop.time() - wire.changed_at >= period:
                await wire.write(self._sign_of_life)


class _Wire:
    """The reply's `send`: starts it with the first write, one write at a time."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.is_started = False
        self.is_ended = False
        self.changed_at = asyncio.get_running_loop().time()  # when a write last began or ended
        self._send = send
        self._headers = headers
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    @property
    def is_writing(self) -> bool:
        return self._lock.locked()

    async def write(self, chunk: bytes, *, is_last: bool = False) -> None:
        async with self._lock:
            if self.is_ended:
                return
            self.changed_at = self._loop.time()
            if not self.is_started:
                self.is_started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self.is_ended = is_last
            await self._send({"type": "http.response.body", "body": chunk, "more_body": not self.is_ended})
            self.changed_at = self._loop.time()


def error_frames(error: ApiError) -> bytes:
    """How a stream of OpenAI's completions and chat completions ends that has failed: its error, and the end mark."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n" + DONE
