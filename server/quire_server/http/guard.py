"""The outer layers of the application: limits on the head, API keys, request ids, and one record per reply."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_engine.own_pauses import OwnPauses
from quire_server.errors import (
    ApiError,
    BadRequest,
    ClientGone,
    HeadersTooLarge,
    RequestTimeout,
    Unauthorized,
    internal_error,
)
from quire_server.http.body_limits import BodyBudget, BodyHold, BodyLimit, BodyLimits, declared_bytes, hold_of, put_hold
from quire_server.http.content_coding import DecodedBody, coding_of
from quire_server.http.envelopes import dialect_of_scope, error_reply
from quire_server.http.own_requests import vouched_for
from quire_server.http.turns import Turns
from quire_server.settings import ServerLimits

PAGES = frozenset(
    {
        *("/", "/docs", "/dashboard", "/learn", "/favicon.ico"),
        *("/pages/page.css", "/pages/icon.svg", "/pages/session.js", "/pages/docs.js"),
        *("/pages/chat.css", "/pages/chat.js", "/pages/answer.js", "/pages/connect.js", "/pages/conversations.js"),
        *("/pages/files.js", "/pages/markdown.js", "/pages/messages.js", "/pages/settings.js", "/pages/sidebar.js"),
        "/pages/slow.js",
        *("/pages/dashboard.css", "/pages/dashboard.js", "/pages/charts.js", "/pages/requests.js"),
        *(
            "/pages/learn.css",
            "/pages/learn.js",
            "/pages/pool.js",
            "/pages/lanes.js",
            "/pages/lessons.js",
            "/pages/contiguous.js",
        ),
    }
)
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/load", "/version", "/metrics"}) | PAGES
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
ADMIN_PATHS = (
    "/debug",
    "/admin",
    "/dashboard/events",
    "/learn/events",
    "/learn/exercises",
    *ADAPTER_PATHS,
)  # with all paths below them; `AdminAuth` guards them

log = logging.getLogger("quire.http")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The record of a reply that has ended. `route` is the template, None where no route matched."""

    request_id: str
    method: str
    path: str  # as sent, still percent-encoded
    route: str | None
    status: int
    seconds: float
    client: str
    key_name: str = ""  # the name of the client's key, or empty
    arguments: Mapping[str, object] = field(default_factory=dict)  # of an operator's order


class Guard:
    """The outermost layer: request id, limits on the head, timeouts, and a reply for unexpected exceptions.

    Every reply has x-request-id, and no byte of a body is read before the head and the key were checked. The path is
    `scope["path"]`, never one rebuilt from headers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: ServerLimits,
        bodies: BodyLimits,
        budget: BodyBudget,
        on_reply: Callable[[Reply], None],
        root_path: str = "",
    ) -> None:
        self._app = app
        self._root_path = root_path
        self._limits = limits
        self._bodies = bodies
        self._budget = budget
        self._on_reply = on_reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = choose_request_id(scope["headers"])
        scope["root_path"] = self._root_path  # routes match with and without it, since not every proxy removes it
        scope.setdefault("state", {})["request_id"] = request_id
        hold, limit = BodyHold(self._budget), self._bodies.of(scope["path"])
        put_hold(scope, hold)
        if limit.is_streamed:
            hold.release()
        exchange = scope["state"]["exchange"] = Exchange(
            receive,
            send,
            request_id,
            limit=limit,
            declared=declared_bytes(scope["headers"]),
            hold=hold,
            body_seconds=self._limits.body_timeout,
            arrival=scope["state"].pop(_ARRIVAL, None),
        )
        if dialect_of_scope(scope) == "anthropic":
            exchange.id_headers = ("x-request-id", "request-id")  # the second is what Anthropic's SDKs read
        try:
            await self._run(scope, exchange)
        finally:
            hold.release()
            self._on_reply(_reply(scope, exchange, time.perf_counter() - started))

    async def _run(self, scope: Scope, exchange: Exchange) -> None:
        try:
            check_head(scope, self._limits)
            await self._app(scope, self._decoded(scope, exchange.receive), exchange.send)
        except ApiError as error:
            if exchange.status is not None:
                raise
            await send_error(error, scope, exchange.receive, exchange.send)
        except Exception:
            if exchange.status is not None:
                raise  # the reply is cut off: the listener closes the connection
            log.exception("unexpected error", extra={"request_id": exchange.request_id})
            await send_error(internal_error(), scope, exchange.receive, exchange.send)

    def _decoded(self, scope: Scope, receive: Receive) -> Receive:
        """Return a channel of the body's decoded content. Raises UnsupportedMediaType."""
        coding, hold = coding_of(scope["headers"]), hold_of(scope)
        if coding is None or hold is None:
            return receive
        return DecodedBody(receive, coding, limit=self._bodies.of(scope["path"]), hold=hold).receive


class KeyAuth:
    """Deny by default: every path except public ones needs a key, as `Authorization: Bearer <key>` or `x-api-key`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        known: Callable[[], Mapping[bytes, str]],
        public: frozenset[str] = PUBLIC_PATHS,
        root_path: str = "",
    ) -> None:
        """`known`: called at each request, the names (or "") by the SHA-256 of the keys that hold now."""
        self._app = app
        self._known = known
        self._public = public | {root_path + path for path in public}
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_elsewhere(scope["path"]):
            known = self._known()
            vouched = vouched_for(scope)
            key = find_key(scope["headers"], known) if vouched is None else vouched.key(known)
            if key is None:
                await send_error(Unauthorized(), scope, receive, send)
                return
            digest, name = key
            # The identity without the key itself.
            scope.setdefault("state", {}).update(key_name=name, key_digest=digest.hex())
        await self._app(scope, receive, send)

    def _is_elsewhere(self, path: str) -> bool:
        """Whether the path is public, or guarded by `AdminAuth`."""
        return path in self._public or is_admin_path(path, self._root_path)


def is_admin_path(path: str, root_path: str = "") -> bool:
    """Whether a path, with or without the root that a proxy may add, is for the operator."""
    bare = path.removeprefix(root_path)
    return any(bare == each or bare.startswith(each + "/") for each in ADMIN_PATHS)


def brought_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys in a request's head, at most one per header: with two it is unclear which a proxy has checked."""
    bearers, plain = [], []
    for name, value in headers:
        if name == b"authorization":
            bearers.append(value)
        elif name == b"x-api-key":
            plain.append(value)
    if len(bearers) > 1 or len(plain) > 1:
        return []
    schemes = [value.partition(b" ") for value in bearers]  # one space or more may stand before the key
    return [*(key.lstrip(b" ") for scheme, _, key in schemes if scheme.lower() == b"bearer"), *plain]


def find_key(headers: Iterable[tuple[bytes, bytes]], known: Mapping[bytes, str]) -> tuple[bytes, str] | None:
    """The digest and the name (or "") of the client's key; None without a known key.

    Digests of equal lengths are compared in constant time, so that the time gives no hint of the key.
    """
    digests = [hashlib.sha256(key).digest() for key in brought_keys(headers)]
    found = [each for digest in digests for each in known.items() if hmac.compare_digest(digest, each[0])]
    return found[0] if found else None


def choose_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's X-Request-Id if it is one plain word of at most 128 characters, else a random id."""
    values = [value for name, value in headers if name == b"x-request-id"]
    if len(values) == 1:
        text = values[0].decode("latin-1")
        if _REQUEST_ID.fullmatch(text):
            return text
    return f"req-{uuid.uuid4().hex}"


def check_head(scope: Scope, limits: ServerLimits) -> None:
    """Raises HeadersTooLarge or BadRequest; reads no body. How much may come is asked later."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    target_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if len(headers) > limits.max_headers:
        raise HeadersTooLarge(f"The request has more than {limits.max_headers} header lines.")
    if target_bytes + sum(len(name) + len(value) + 4 for name, value in headers) > limits.max_header_bytes:
        raise HeadersTooLarge(f"The request's head is larger than {limits.max_header_bytes} bytes.")
    lengths = [value for name, value in headers if name == b"content-length"]
    if len(lengths) > 1 or (lengths and any(name == b"transfer-encoding" for name, _ in headers)):
        raise BadRequest(
            "The length of the body is ambiguous.", code="invalid_framing", headers={"Connection": "close"}
        )
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):  # other codings would be taken for the body
        raise BadRequest(
            "The only supported Transfer-Encoding is chunked.", code="invalid_framing", headers={"Connection": "close"}
        )
    if codings and scope["http_version"] == "1.0":  # a proxy of that version would pass on a body of another length
        raise BadRequest(
            "A body in HTTP/1.0 needs a Content-Length.", code="invalid_framing", headers={"Connection": "close"}
        )
    if lengths and not (lengths[0].isdigit() and len(lengths[0]) < 20):
        raise BadRequest("Content-Length is not a number.", code="invalid_framing", headers={"Connection": "close"})


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the error as a whole reply, in the envelope of its path."""
    await error_reply(error, scope)(scope, receive, send)


def _reply(scope: Scope, exchange: Exchange, seconds: float) -> Reply:
    status = exchange.status
    if status is None:
        status = ClientGone.status if exchange.client_gone else ApiError.status
    return reply_record(scope, exchange.request_id, status, seconds)


def reply_record(scope: Scope, request_id: str, status: int, seconds: float) -> Reply:
    """The record of a reply to the request of this scope."""
    raw_path = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    client = scope.get("client")
    return Reply(
        request_id=request_id,
        method=scope["method"],
        path=raw_path.decode("ascii", "backslashreplace")[:256],
        route=getattr(scope.get("route"), "path", None),
        status=status,
        seconds=seconds,
        client=client[0] if client else "",
        key_name=scope.get("state", {}).get("key_name", ""),
        arguments=scope.get("state", {}).get("arguments", {}),
    )


STREAMED_RATE = 64 << 10  # bytes a second that a streamed body must have on average, beyond the time of any body
LINGER_SECONDS = 2.0
_LOOK_SECONDS = 1.0  # between two looks for a pause of this process while a body is awaited
QUIET_SECONDS = 0.3  # a client that sends nothing for so long has read the reply, or sends no more
LINGER_BYTES = 16 << 20
SPARE_BYTES = 64 << 10  # most unread bytes of a body for which the connection is kept


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a request's body, as its connection sees it."""

    pauses: OwnPauses  # of this process, in which no client is slow
    turns: Turns  # of the event loop
    is_whole: Callable[[], bool]  # whether all of the body has come


_ARRIVAL = "arrival"


def put_arrival(scope: Scope, arrival: Arrival) -> None:
    """Leave it for the guard, which takes it out again."""
    scope["state"][_ARRIVAL] = arrival


class Exchange:
    """Wraps one request's `receive` and `send` to count and time them.

    A body is bounded by its route's limit, by the budget for all bodies and by its timeout. One that came after its
    request had begun takes a turn of the event loop, as many may end at once. A reply that is sent before its request
    was read is not lost to a reset.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        request_id: str,
        *,
        limit: BodyLimit,
        declared: int | None,
        hold: BodyHold,
        body_seconds: float,
        arrival: Arrival | None = None,
    ) -> None:
        """`arrival`: None where no connection of this process brings the body."""
        self.request_id = request_id
        self.status: int | None = None
        self.client_gone = False
        self.id_headers: tuple[str, ...] = ("x-request-id",)
        self._receive = receive
        self._send = send
        self._limit = limit
        self._declared = declared
        self._hold = hold
        self._body_seconds = self._allowed = body_seconds  # the second: for as much as has arrived
        self._arrival = arrival
        self._pauses = OwnPauses(_LOOK_SECONDS) if arrival is None else arrival.pauses
        self._began = self._pauses.now()
        self._body_bytes = 0
        self._body_complete = False
        self._is_awaited = False  # whether some of the body came after its request had asked for it
        self._closes = False  # whether the connection closes, because too much of the body is unread

    async def receive(self) -> Message:
        if self._body_complete or self.client_gone:
            message = await self._receive()
        else:
            self._is_awaited |= self._arrival is not None and not self._arrival.is_whole()
            message = await self._receive_in_time()
        if message["type"] == "http.disconnect":
            self.client_gone = True
        elif message["type"] == "http.request":
            arrived = len(message.get("body", b""))
            self._body_bytes += arrived
            if self._limit.is_streamed:
                self._allowed += arrived / STREAMED_RATE
            self._body_complete = not message.get("more_body", False)
            if self._body_bytes > self._limit.max_bytes:
                self._hold.release()
                raise self._limit.too_large()
            self._hold.grow(arrived)
            if self._body_complete and self._is_awaited and self._arrival is not None:
                await self._arrival.turns.go_on()
        return message

    async def _receive_in_time(self) -> Message:
        """The next message. Raises RequestTimeout once the client, and not this process, has let pass its time."""
        while True:
            left = self._allowed - self._pauses.silence(self._began)
            try:
                async with asyncio.timeout(min(left, _LOOK_SECONDS)):
                    return await self._receive()
            except TimeoutError:
                if self._pauses.silence(self._began) >= self._allowed:
                    late = f"The body took longer than {self._body_seconds:g} s to arrive."
                    raise RequestTimeout(late) from None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name in self.id_headers:
                headers[name] = self.request_id
            if self._is_far_from_read():
                self._closes = True
                headers["connection"] = "close"
        elif message["type"] == "http.response.body" and not message.get("more_body", False) and self._closes:
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def _is_far_from_read(self) -> bool:
        if self._body_complete:
            return False
        return self._declared is None or self._declared - self._body_bytes > SPARE_BYTES

    async def _linger(self) -> None:
        """Read on for a while after a refusal: closing with unread bytes would reset the connection."""
        dropped = 0
        until = asyncio.get_running_loop().time() + LINGER_SECONDS
        try:
            while dropped < LINGER_BYTES and not self._body_complete:
                quiet_at = asyncio.get_running_loop().time() + QUIET_SECONDS
                async with asyncio.timeout_at(min(until, quiet_at)):
                    message = await self._receive()
                self._body_complete = message["type"] != "http.request" or not message.get("more_body", False)
                dropped += len(message.get("body", b""))
        except TimeoutError:
            return
