"""The requests whose replies have not begun, or not ended: whom a server that stops still owes a word.

Promises: who is waited for is known when the wait begins, however many come after; who has got no reply when time is up
gets one, a 503, in place of a closed connection. Must not know: routes, the engine, why the server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.errors import ShuttingDown
from quire_server.http.guard import is_admin_path, send_error


class Replying(Protocol):
    """What is known of a reply: its status, None until its first byte was sent."""

    @property
    def status(self) -> int | None: ...


class OpenRequests:
    """Each request by the task that serves it."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[Any], tuple[Scope, Replying]] = {}
        self._refused: set[asyncio.Task[Any]] = set()

    def begins(self, task: asyncio.Task[Any], scope: Scope, reply: Replying) -> None:
        self._open[task] = scope, reply

    def ends(self, task: asyncio.Task[Any]) -> None:
        self._open.pop(task, None)
        self._refused.discard(task)

    def is_refused(self, task: asyncio.Task[Any]) -> bool:
        return task in self._refused

    def work(self) -> tuple[asyncio.Task[Any], ...]:
        """The requests that something is computed or prepared for; pages, probes and the operator's are none."""
        return tuple(
            task
            for task, (scope, _) in self._open.items()
            if scope["method"] == "POST" and not is_admin_path(scope["path"], scope["root_path"])
        )

    def refuse_unanswered(self) -> None:
        """Whoever has got no byte of a reply gets a 503 now, and what was done for it ends."""
        for task, (_, reply) in tuple(self._open.items()):
            if reply.status is None:
                self._refused.add(task)
                task.cancel()


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Until these requests have ended, however."""
    waiting = set(tasks)
    if waiting:
        await asyncio.wait(waiting)


class LastWord:
    """The layer that knows them; directly inside of `Guard`."""

    def __init__(self, app: ASGIApp, *, requests: OpenRequests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        # Out of the scope: it leads back to the scope, and who is freed late holds a body.
        self._requests.begins(task, scope, scope["state"].pop("exchange"))
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._requests.is_refused(task):
                raise
            task.uncancel()
            await send_error(ShuttingDown(), scope, receive, send)
        finally:
            self._requests.ends(task)
