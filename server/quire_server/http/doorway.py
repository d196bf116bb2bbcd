"""The application that the listener calls: one for the start, until the one that serves takes its place.

Promises: a request is served by one of them as a whole; connections opened before go on with the next request.
Must not know: what either does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi import FastAPI


class Doorway:
    """Leads to one application at a time, and keeps the one that serves alive until the listener ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._num_connections = 0
        self._on_connections: Callable[[int], None] = lambda _: None
        self._app = app
        self._serving = AsyncExitStack()

    async def open(self, app: FastAPI) -> None:
        """From now on requests go to this one. Its own start and end are the doorway's."""
        await self._serving.enter_async_context(app.router.lifespan_context(app))
        self._app = app

    def tell_connections(self, number: int) -> None:
        """The listener has so many."""
        self._num_connections = number
        self._on_connections(number)

    def watch_connections(self, on_connections: Callable[[int], None]) -> None:
        """Who wants to know, from now on, how many there are."""
        self._on_connections = on_connections
        on_connections(self._num_connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._serving.aclose()
        await send({"type": "lifespan.shutdown.complete"})
