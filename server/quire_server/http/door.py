"""Refuses requests to a full queue where the connection has read their heads, before a task exists for them.

Promises: such a refusal has the bytes, the log line and the counts that the layers give it; whatever they would answer
otherwise, or would add something to, is left to them. Must not know: sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from quire_server.errors import ApiError, QueueFull
from quire_server.http.access import HostCheck, checks_hosts
from quire_server.http.body_limits import BodyLimits, declared_bytes
from quire_server.http.credentials import Credentials
from quire_server.http.envelopes import dialect_of
from quire_server.http.guard import SPARE_BYTES, Reply, check_head, choose_request_id, find_key, reply_record
from quire_server.http.overload import QUEUED_PATHS, Refusals, Route, Underway
from quire_server.settings import ServerLimits, Settings

# With these the layers have more to do: another site's page, a client that waits to be asked for the body, a body
# that is compressed, perhaps in a way that is not known, an operator who asks for more headers.
_NOT_PLAIN = frozenset({b"origin", b"expect", b"content-encoding", b"x-quire-explain"})


@dataclass(frozen=True, slots=True)
class Refused:
    """The whole reply to a refused request."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Door:
    """Refuses plain requests; the connection asks it at each request's head.

    Under overload most requests are refused. A task, a body's timeout and ten layers for each take several times what
    the refusal itself does, and the accepted requests go without that time.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        credentials: Credentials,
        limits: ServerLimits,
        bodies: BodyLimits,
        underway: Underway,
        is_full: Callable[[int, int], bool],
        refusal: Callable[[int, int], QueueFull | None],
        on_reply: Callable[[Scope, Reply], None],
    ) -> None:
        """`is_full`, `refusal`: called with the numbers of `Underway.counts`; only the second counts a refusal."""
        self._limits, self._bodies = limits, bodies
        self._known = (lambda: credentials.known.api) if settings.needs_key else None
        hosts = HostCheck(_no_app, allowed=settings.allowed_hosts, root_path=settings.root_path)
        self._hosts = hosts if checks_hosts(settings) else None
        self._underway, self._is_full, self._refusal, self._on_reply = underway, is_full, refusal, on_reply
        # What CORS adds to replies that no other site's page has asked for.
        self._tail = [(b"vary", b"Origin")] if settings.allowed_origins else []
        self._refusals = Refusals()
        plain = [path for path in QUEUED_PATHS if dialect_of(path) == "openai"]
        self._routes = {root + path: Route(path) for path in plain for root in ("", settings.root_path)}

    def refuse(self, scope: Scope) -> Refused | None:
        """The reply to a request that is refused at once; None: it goes on to the layers."""
        if not self._is_full(*self._underway.counts()):
            return None
        started = time.perf_counter()
        route = self._routes.get(scope["path"])
        if route is None or scope["method"] != "POST" or not self._is_plain(scope):
            return None
        key_name = ""
        if self._known is not None:
            key = find_key(scope["headers"], self._known())
            if key is None:
                return None
            key_name = key[1]
        error = self._refusal(*self._underway.counts())
        if error is None:
            return None
        body, headers = self._refusals.reply(error)
        request_id = choose_request_id(scope["headers"])
        headers += [(b"x-request-id", request_id.encode()), *self._tail]
        scope["route"] = route
        scope["state"]["key_name"] = key_name
        self._on_reply(scope, reply_record(scope, request_id, error.status, time.perf_counter() - started))
        return Refused(error.status, headers, body)

    def _is_plain(self, scope: Scope) -> bool:
        """Whether the layers would let the request through to the queue, and its body needs no care."""
        headers = scope["headers"]
        declared = declared_bytes(headers)
        if declared is None or declared > min(SPARE_BYTES, self._bodies.of(scope["path"]).max_bytes):
            return False
        if any(name in _NOT_PLAIN for name, _ in headers):
            return False
        if self._hosts is not None and self._hosts.foreign(headers) is not None:
            return False
        try:
            check_head(scope, self._limits)
        except ApiError:
            return False
        return True


async def _no_app(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """The application of a `HostCheck` that is only asked about heads."""
