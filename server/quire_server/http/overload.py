"""Overload and shutdown: refuses requests early when the queue is full, and answers open requests at the stop."""

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
from quire_server.http.envelopes import dialect_of_scope, error_reply
from quire_server.http.guard import is_admin_path, send_error

QUEUED_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/infill"),
    *("/v1/embeddings", "/v1/score", "/score"),
    *("/v1/rerank", "/v2/rerank", "/rerank", "/classify", "/v1/classify"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
)
_LATELY_SECONDS = 1.0  # requests that are sent or prepared for longer are not counted
_STATE, _KEY = "state", "underway"


def has_arrived(scope: Scope) -> None:
    """The request is about to be queued, and counts there from now on."""
    end = scope.get(_STATE, {}).pop(_KEY, None)
    if end is not None:
        end()


class Underway:
    """Requests that were accepted by `RefuseWhenFull` and have not reached the queue yet.

    If every free place in the queue let all requests pass until it is taken, the time from acceptance to the queue
    would grow with their number: the queue would run empty before the first of them arrives, and no request would be
    refused. So requests underway are counted; while seats are free, only those of the last second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By number, in order of insertion.
        self._sent_since: dict[int, float] = {}
        self._whole_since: dict[int, float] = {}  # with a complete body, of the last second
        self._whole: set[int] = set()
        self._numbers = count()

    def begin(self) -> int:
        """Count a request whose body may still be on its way; returns its number for later calls."""
        number = next(self._numbers)
        self._sent_since[number] = self._clock()
        return number

    def has_come(self, number: int) -> None:
        """The request's whole body has arrived."""
        self._sent_since.pop(number, None)
        if number not in self._whole:
            self._whole.add(number)
            self._whole_since[number] = self._clock()

    def end(self, number: int) -> None:
        """The request has reached the queue, or has ended before."""
        self._sent_since.pop(number, None)
        self._whole_since.pop(number, None)
        self._whole.discard(number)

    def counts(self) -> tuple[int, int]:
        """(Requests whose body was complete in the last second, all requests underway except slow senders)."""
        latest = self._clock() - _LATELY_SECONDS
        for since in (self._sent_since, self._whole_since):
            while since:
                oldest = next(iter(since))
                if since[oldest] > latest:
                    break
                del since[oldest]
        return len(self._whole_since), len(self._whole) + len(self._sent_since)


@dataclass(frozen=True, slots=True)
class Route:
    """The route's path for logs and metrics, since routing is skipped."""

    path: str


class Refusals:
    """The replies to refused requests in OpenAI's envelope; bodies are made once."""

    def __init__(self) -> None:
        self._bodies: dict[str, tuple[bytes, bytes]] = {}  # with their lengths, by error message: there are few

    def reply(self, error: QueueFull) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """The body, and the headers except for the request's id."""
        known = self._bodies.get(error.message)
        if known is None:
            body = msgspec.json.encode(error_body(error))
            known = self._bodies[error.message] = body, b"%d" % len(body)
        body, length = known
        own = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        return body, [(b"content-length", length), (b"content-type", b"application/json"), *own]


class RefuseWhenFull:
    """Calls `refusal` for each request that would be queued; None lets it pass. `door.Door` refuses most before it.

    Under overload most requests are refused, and the time for refusals is lost to the accepted ones. So a refusal needs
    no routing, no body, no template and no tokenizer. The body of a refused request is not parsed: the server skips it,
    and the connection serves the next request. A request is refused here only if the queue would refuse it, except for
    a few when the queue is about to be full.

    `refusal` is called with the numbers of `Underway.counts`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        refusal: Callable[[int, int], QueueFull | None],
        underway: Underway,
        paths: Iterable[str] = QUEUED_PATHS,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._refusal = refusal
        self._routes = {root + path: Route(path) for path in paths for root in ("", root_path)}
        self._underway = underway
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._routes.get(scope["path"])
            if route is not None:
                await self._refuse_or_pass(route, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refuse_or_pass(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
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
        if dialect_of_scope(scope) != "openai":  # Anthropic's body has the request's id
            await error_reply(error, scope)(scope, receive, send)
            return
        body, headers = self._refusals.reply(error)
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Replying(Protocol):
    """A reply in progress: its status, None until its first byte is sent."""

    @property
    def status(self) -> int | None: ...


class OpenRequests:
    """The requests without a complete reply, by the task that serves them."""

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
        """The requests for generation and other work; not pages, probes and admin requests."""
        return tuple(
            task
            for task, (scope, _) in self._open.items()
            if scope["method"] == "POST" and not is_admin_path(scope["path"], scope["root_path"])
        )

    def refuse_unanswered(self) -> None:
        """Answer every request without a reply with 503 now, and cancel its work."""
        for task, (_, reply) in tuple(self._open.items()):
            if reply.status is None:
                self._refused.add(task)
                task.cancel()


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until these requests have ended."""
    waiting = set(tasks)
    if waiting:
        await asyncio.wait(waiting)


class RefuseAtStop:
    """The layer that registers each request with `OpenRequests`; directly inside of `Guard`.

    A request without a reply when the server's time to stop is over gets a 503 instead of a closed connection.
    """

    def __init__(self, app: ASGIApp, *, requests: OpenRequests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        # Removed from the scope to avoid a reference cycle, which would keep the body in memory.
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
