"""Refuses what a full queue would refuse anyway, and owes those whose replies have not begun a word at the stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_server.errors import QueueFull, ShuttingDown, error_body
from quire_server.http.envelopes import error_reply, is_anthropic
from quire_server.http.guard import is_admin_path, send_error

QUEUED_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/infill"),
    *("/v1/embeddings", "/v1/score", "/score"),
)
_LATELY_SECONDS = 1.0  # who sends slowly may not keep others out, nor whose text takes long while seats are free
_STATE, _KEY = "state", "underway"


def has_arrived(scope: Scope) -> None:
    """The request is about to be queued, where it counts from now on."""
    end = scope.get(_STATE, {}).pop(_KEY, None)
    if end is not None:
        end()


class Underway:
    """Requests that were let pass and have not reached the queue yet.

    If each place that comes free let everybody pass until it is taken, the while that a request takes to the queue
    would grow with their number: soon the queue would run empty before the first of them arrives, and nobody be
    refused. So those underway count; while seats are free, those of the last second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Each by number, in the order in which they came to be there.
        self._sent_since: dict[int, float] = {}
        self._whole_since: dict[int, float] = {}  # lately
        self._whole: set[int] = set()
        self._numbers = count()

    def begin(self) -> int:
        """A request whose body may still be on its way; the number is for the calls that follow."""
        number = next(self._numbers)
        self._sent_since[number] = self._clock()
        return number

    def has_come(self, number: int) -> None:
        """Its whole body is there."""
        self._sent_since.pop(number, None)
        if number not in self._whole:
            self._whole.add(number)
            self._whole_since[number] = self._clock()

    def end(self, number: int) -> None:
        """It has reached the queue, or ended before."""
        self._sent_since.pop(number, None)
        self._whole_since.pop(number, None)
        self._whole.discard(number)

    def counts(self) -> tuple[int, int]:
        """How many came lately and are worked on; how many are underway in all, but for those who send slowly."""
        latest = self._clock() - _LATELY_SECONDS
        for since in (self._sent_since, self._whole_since):
            while since:
                oldest = next(iter(since))
                if since[oldest] > latest:
                    break
                del since[oldest]
        return len(self._whole_since), len(self._whole) + len(self._sent_since)


@dataclass(frozen=True, slots=True)
class _Route:
    """What logs and metrics call the route that would have answered."""

    path: str


class RefuseWhenFull:
    """Asks `refusal` about each request that would have to be queued; None lets it through.

    Under overload most of what arrives is refused, and whatever a refusal takes is missing for those who were accepted:
    so it takes no routing, no body, no template and no tokenizer. The body of a refused request is left where it is:
    the server passes over it, and the connection serves the next one. Nobody is refused here who could have been
    accepted, but for a few when the queue is about to be full.

    It is told how many are underway to the queue, as `Underway.counts` gives them.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        refusal: Callable[[int, int], QueueFull | None],
        paths: Iterable[str] = QUEUED_PATHS,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._refusal = refusal
        self._routes = {root + path: _Route(path) for path in paths for root in ("", root_path)}
        self._underway = Underway()
        self._bodies: dict[str, tuple[bytes, list[tuple[bytes, bytes]]]] = {}  # by message, which is one of few

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._routes.get(scope["path"])
            if route is not None:
                await self._refuse_or_pass(route, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refuse_or_pass(self, route: _Route, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(*self._underway.counts())
        if error is not None:
            scope["route"] = route
            await self._refuse(error, scope, receive, send)
            return
        number = self._underway.begin()
        scope.setdefault(_STATE, {})[_KEY] = partial(self._underway.end, number)

        async def watched() -> Message:
            message = await receive()
            if _KEY in scope[_STATE] and not message.get("more_body", False):
                self._underway.has_come(number)
            return message

        try:
            await self._app(scope, watched, send)
        finally:
            has_arrived(scope)

    async def _refuse(self, error: QueueFull, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic(scope):  # its body has the request's id
            await error_reply(error, scope)(scope, receive, send)
            return
        known = self._bodies.get(error.message)
        if known is None:
            body = msgspec.json.encode(error_body(error))
            head = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
            known = self._bodies[error.message] = body, head
        body, head = known
        own = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": head + own})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Replying(Protocol):
    """What is known of a reply: its status, None until its first byte was sent."""

    @property
    def status(self) -> int | None: ...


class OpenRequests:
    """The requests whose replies have not begun, or not ended, each by the task that serves it."""

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
    """The layer that tells `OpenRequests` of each request; directly inside of `Guard`.

    Who has got no reply when a server that stops has no time left gets a 503 in place of a closed connection.
    """

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
