"""Requests that an API server accepts and the main process answers, as ASGI messages over their link.

Promises: the reply's bytes are those that the main process would send itself; one piece of a body, and one of a reply,
is on its way at a time, so neither end holds more. Must not know: routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_server.api_servers.frames import Began, Came, Left, Sent, Took, Wanted

log = logging.getLogger("quire.http")


class Forwarder:
    """The API server's end: an ASGI application whose replies come from the main process."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        """`send`: sends a frame to the main process."""
        self._send = send
        self._frames: dict[int, asyncio.Queue[Wanted | Sent]] = {}
        self._numbers = count(1)

    def receive(self, frame: Wanted | Sent) -> None:
        """A frame has come; for a request that has ended meanwhile it is passed over."""
        frames = self._frames.get(frame.stream)
        if frames is not None:
            frames.put_nowait(frame)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        stream = next(self._numbers)
        frames = self._frames[stream] = asyncio.Queue()
        self._send(_began(stream, scope))
        reading: asyncio.Task[None] | None = None
        try:
            while True:
                frame = await frames.get()
                if isinstance(frame, Wanted):
                    reading = asyncio.create_task(self._read(stream, receive))
                elif frame.failed:
                    return  # the client is gone, or the listener cuts the reply off
                else:
                    await _pass_on(frame, send)
                    if not frame.more:
                        return
                    self._send(Took(stream=stream))
        finally:
            del self._frames[stream]
            if reading is not None:
                reading.cancel()
            self._send(Left(stream=stream))

    async def _read(self, stream: int, receive: Receive) -> None:
        message = await receive()
        if message["type"] == "http.disconnect":
            self._send(Left(stream=stream))
        else:
            self._send(Came(stream=stream, body=message.get("body", b""), more=message.get("more_body", False)))


def _began(stream: int, scope: Scope) -> Began:
    client, server = scope.get("client"), scope.get("server")
    return Began(
        stream=stream,
        method=scope["method"],
        scheme=scope["scheme"],
        http_version=scope["http_version"],
        path=scope["path"],
        raw_path=scope.get("raw_path", b""),
        query_string=scope["query_string"],
        headers=tuple((name, value) for name, value in scope["headers"]),
        client=None if client is None else (client[0], client[1]),
        server=None if server is None else (server[0], server[1]),
    )


async def _pass_on(frame: Sent, send: Send) -> None:
    if frame.status:
        await send({"type": "http.response.start", "status": frame.status, "headers": list(frame.headers)})
    await send({"type": "http.response.body", "body": frame.body, "more_body": frame.more})


class Forwarded:
    """The main process's end: the requests of one API server, answered by the application."""

    def __init__(self, app: ASGIApp, send: Callable[[Any], None]) -> None:
        """`send`: sends a frame to the API server."""
        self._app, self._send = app, send
        self._open: dict[int, _Exchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, frame: Began | Came | Left | Took) -> None:
        """A frame has come."""
        if isinstance(frame, Began):
            exchange = self._open[frame.stream] = _Exchange(frame.stream, self._send)
            task = asyncio.create_task(self._answer(exchange, _scope(frame)), name="forwarded-request")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        open_one = self._open.get(frame.stream)
        if open_one is not None:
            open_one.take(frame)

    def close(self) -> None:
        """The API server is gone, and with it the clients of its requests."""
        for exchange in self._open.values():
            exchange.leave()

    async def _answer(self, exchange: _Exchange, scope: Scope) -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("a request of an API server failed")
        finally:
            del self._open[exchange.stream]
            if not exchange.is_complete:
                self._send(Sent(stream=exchange.stream, failed=True))


def _scope(began: Began) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": began.http_version,
        "method": began.method,
        "scheme": began.scheme,
        "path": began.path,
        "raw_path": began.raw_path,
        "query_string": began.query_string,
        "root_path": "",
        "headers": list(began.headers),
        "client": began.client,
        "server": began.server,
        "state": {},
    }


class _Exchange:
    """One request of an API server's client, as the application sees it."""

    def __init__(self, stream: int, send: Callable[[Any], None]) -> None:
        self.stream = stream
        self.is_complete = False
        self._tell = send
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._is_wanted = False
        self._has_left = False
        self._head: Message | None = None  # not sent yet
        self._taken = asyncio.Event()  # the piece before was passed on

    async def receive(self) -> Message:
        if self._has_left and self._messages.empty():
            return {"type": "http.disconnect"}
        if not self._is_wanted and self._messages.empty():
            self._is_wanted = True
            self._tell(Wanted(stream=self.stream))
        return await self._messages.get()

    async def send(self, message: Message) -> None:
        if self._has_left or self.is_complete:
            return
        if message["type"] == "http.response.start":
            self._head = message
            return
        head, self._head = self._head, None
        more = bool(message.get("more_body", False))
        self._taken.clear()
        self._tell(
            Sent(
                stream=self.stream,
                status=0 if head is None else head["status"],
                headers=() if head is None else tuple((name, value) for name, value in head["headers"]),
                body=message.get("body", b""),
                more=more,
            )
        )
        self.is_complete = not more
        if more:
            await self._taken.wait()

    def take(self, frame: Came | Left | Took) -> None:
        if isinstance(frame, Came):
            self._is_wanted = False
            self._messages.put_nowait({"type": "http.request", "body": frame.body, "more_body": frame.more})
        elif isinstance(frame, Took):
            self._taken.set()
        else:
            self.leave()

    def leave(self) -> None:
        """The client is gone, or has its reply."""
        self._has_left = True
        self._messages.put_nowait({"type": "http.disconnect"})
        self._taken.set()


LOCAL_METHOD = "POST"


class LocalOrForwarded:
    """An API server's application: some paths are its own, all others the main process's."""

    def __init__(self, local: ASGIApp, forwarder: ASGIApp, *, paths: frozenset[str], root_path: str = "") -> None:
        """`paths`: those of POST requests that are answered here, with and without `root_path`."""
        self._local, self._forwarder = local, forwarder
        self._paths = paths | {root_path + path for path in paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_local = scope["type"] == "http" and scope["method"] == LOCAL_METHOD and scope["path"] in self._paths
        await (self._local if is_local else self._forwarder)(scope, receive, send)
