"""Refuses what a full queue would refuse anyway, before anything is done for it.

Promises: nobody is refused here who could have been accepted, but for a few when all seats are taken; a refusal takes
no routing, no body, no template and no tokenizer, and reads as one that comes later. Must not know: how the queue is
kept, who may ask.

Under overload most of what arrives is refused, and whatever a refusal takes is missing for those who were accepted. The
body of a refused request is left where it is: the server passes over it, and the connection serves the next one.

A request takes a while from here to the queue. If each place that comes free let everybody pass until it is taken, that
while would grow with their number, and soon nobody would be refused here. So those underway count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.errors import QueueFull, error_body
from quire_server.http.envelopes import error_reply, is_anthropic

QUEUED_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/infill"),
    *("/v1/embeddings", "/v1/score", "/score"),
)
_LONGEST_SECONDS = 1.0  # that one counts as underway: who sends his body slowly may not keep others out
_STATE, _KEY = "state", "underway"


def has_arrived(scope: Scope) -> None:
    """The request is about to be queued, where it counts from now on."""
    end = scope.get(_STATE, {}).pop(_KEY, None)
    if end is not None:
        end()


class Underway:
    """Requests that were let pass lately and have not reached the queue yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[int, float] = {}  # by number, so in the order in which they came
        self._numbers = count()

    def begin(self) -> Callable[[], None]:
        """What is to be called when it has reached the queue, or ended before."""
        number = next(self._numbers)
        self._since[number] = self._clock()
        return lambda: self._end(number)

    def _end(self, number: int) -> None:
        self._since.pop(number, None)

    def __len__(self) -> int:
        latest = self._clock() - _LONGEST_SECONDS
        while self._since:
            oldest = next(iter(self._since))
            if self._since[oldest] > latest:
                break
            del self._since[oldest]
        return len(self._since)


@dataclass(frozen=True, slots=True)
class _Route:
    """What logs and metrics call the route that would have answered."""

    path: str


class RefuseWhenFull:
    """Asks `refusal` about each request that would have to be queued; None lets it through.

    It is told how many are underway to the queue.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        refusal: Callable[[int], QueueFull | None],
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
        error = self._refusal(len(self._underway))
        if error is not None:
            scope["route"] = route
            await self._refuse(error, scope, receive, send)
            return
        scope.setdefault(_STATE, {})[_KEY] = self._underway.begin()
        try:
            await self._app(scope, receive, send)
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
