"""One HTTP/1.1 connection: its timeouts and limits, and the refusals that come before the application."""

from __future__ import annotations

import asyncio
import json
import select
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, Literal, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState as ConnectionRegistry

from quire_engine.own_pauses import OwnPauses
from quire_server.errors import (
    ApiError,
    BadRequest,
    HeadersTooLarge,
    NotReady,
    QueueFull,
    RequestTimeout,
    error_body,
)
from quire_server.http.acceptor import BODILESS
from quire_server.http.body_limits import declared_bytes
from quire_server.http.door import Door, Refused
from quire_server.http.guard import Arrival, choose_request_id, put_arrival
from quire_server.http.sse import HIGH_WATER_BYTES, TRANSPORT, WriteClock, WritePace, waiting_bytes
from quire_server.http.turns import Turns

LINGER_SECONDS = (
    1.0  # before closing: closing at once would reset the connection before the client has read the refusal
)
_BODILESS_METHODS = frozenset(word.decode().strip() for word in BODILESS)
_WIRE_OVERHEAD = 8  # bytes per body byte: chunked framing needs at most 5; the rest is for trailers and extensions
_UNREAD_BYTES = 16 << 10  # in the transport; behind more, requests are not refused at once
_TIMER_SECONDS = 0.05  # by which the event loop's timers may be early
ADDRESS_SECONDS = 5.0  # Retry-After for a client with too many connections


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits and timeouts of a connection; times in seconds."""

    max_connections: int
    max_connections_per_address: int
    max_header_bytes: int
    max_body_bytes: int
    header_timeout: float
    write_pace: WritePace

    @property
    def max_wire_bytes(self) -> int:
        """Most bytes of one request, framing included."""
        return self.max_header_bytes + _WIRE_OVERHEAD * self.max_body_bytes


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration with our connection class and limits, and without other sources of settings."""

    def __init__(
        self,
        app: Callable[..., Any],
        *,
        limits: ConnectionLimits,
        uncounted: Iterable[str] = (),
        on_connections: Callable[[int], None] = lambda _: None,
        keep_alive_seconds: float,
        tls: ssl.SSLContext | None = None,
        door: Callable[[], Door | None] = lambda: None,
        pauses: OwnPauses,
        turns: Turns,
    ) -> None:
        """`door`: called at each request's head, what may refuse it at once; None: nothing does.

        `pauses`: of this process, in which no client is slow. `turns`: of its event loop, one for each request's work.
        """
        super().__init__(
            app,
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            forwarded_allow_ips="",
            workers=1,
        )
        self.timeout_keep_alive = keep_alive_seconds  # type: ignore[assignment]  # a delay; fractions are fine
        self.limits = limits
        self.addresses = Addresses(limits.max_connections_per_address, uncounted)
        self.on_connections = on_connections
        self.pauses = pauses
        self.turns = turns
        self.door = door
        self.turned_away: set[Connection] = (
            set()
        )  # refused connections that are open until their clients have read the refusal
        self.tls = tls


class Connection(HttpToolsProtocol):
    """One connection. In addition to uvicorn's: a timeout for each request's head, a write timeout, limits on bytes.

    A client cannot hold it by being slow or silent; a request that does not parse is answered in our envelope.
    """

    def __init__(
        self,
        config: ConnectionConfig,
        server_state: ConnectionRegistry,
        app_state: dict[str, Any],
        *,
        has_turn: bool = False,
    ) -> None:
        """`has_turn`: the first request has waited for its turn already."""
        super().__init__(config, server_state, app_state)
        self._limits = config.limits
        self._addresses = config.addresses
        self._on_connections = config.on_connections
        self._door = config.door
        self._pauses, self._turns, self._has_turn = config.pauses, config.turns, has_turn
        self._is_asking = False  # whether the door is to be asked about the request whose head has just come
        self._turned_away = config.turned_away
        self._place: str | None = None  # the key in `_addresses`
        self._in_head = False
        self._head_bytes = 0  # bytes of the head after its first chunk
        self._wire_bytes = 0
        self._plain_bytes = 0  # bytes of a body with Content-Length that are still to come
        self._refused = False
        self._unanswered: list[RequestResponseCycle] = []  # requests before the latest, as far as it was known
        self._head_clock: asyncio.TimerHandle | None = None
        self._silent_since = 0.0  # when the head clock, or the one of a kept connection, began
        self._write_clock: WriteClock | None = None
        self._half_closed: HalfClosedWatch | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._intake = self.flow = Intake(transport, self._parse, lambda: self._plain_bytes)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._start_head_clock()
        self._place, is_one_too_many = self._addresses.enter(None if self.client is None else self.client[0])
        if len(self.connections) > self._limits.max_connections:
            self._turn_away(NotReady("Too many connections are open; retry later.", code="too_many_connections"))
        elif is_one_too_many:
            message = "Too many connections are open from this address; close some, or use them again."
            self._turn_away(QueueFull(message, retry_after_seconds=ADDRESS_SECONDS, code="too_many_connections"))
        self._on_connections(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clocks()
        self._intake.stop()
        super().connection_lost(exc)
        self._addresses.leave(self._place)
        self._place = None
        self._turned_away.discard(self)
        self._on_connections(len(self.connections))

    def eof_received(self) -> bool:  # type: ignore[override]  # true keeps the connection open
        """The client has closed its side: it has left, or has sent its last request. True keeps it open."""
        if not self._answers_half_closed():
            return False
        if self._half_closed is None:
            self.cycle.keep_alive = False  # no further request can come; with pipelining, this is the last one
            self._half_closed = HalfClosedWatch(self.transport, may_probe=self._may_probe)
            self._half_closed.start()
        return True

    def data_received(self, data: bytes) -> None:
        if self._intake.is_keeping or not self._begins_work(data):
            self._intake.take(data)
        elif self._has_turn or self._turns.is_free():
            self._in_turn(partial(self._intake.take, data))
        else:
            self._intake.keep(data)
            self._stop_head_clock()  # the client has spoken
            self._unset_keepalive_if_required()
            self._turns.wait(partial(self._in_turn, self._intake.go_on_now))

    def _begins_work(self, data: bytes) -> bool:
        """Whether these bytes begin a request that may have a body."""
        is_new = self._is_between_requests() and not self._in_head and not self._refused
        return is_new and not data.startswith(BODILESS)

    def _in_turn(self, parse: Callable[[], None]) -> None:
        """Parse bytes; the request whose head ends in them begins at once."""
        self._has_turn = True
        try:
            parse()
        finally:
            self._has_turn = False

    def _parse(self, data: bytes) -> bool:
        """Parse some of the bytes that have arrived; returns whether more may be parsed now."""
        if self._refused or self.transport.is_closing():
            return True
        self._wire_bytes += len(data)
        if self._in_head:
            self._head_bytes += len(data)
        if self._drops_chunks():
            self.cycle.message_event.set()  # `_linger` sees that the client still sends
        else:
            super().data_received(data)
        if self._refused or self.transport.is_closing():
            return True
        if self._wire_bytes > self._limits.max_wire_bytes:
            self.transport.abort()
        elif self._in_head and self._head_bytes > self._limits.max_header_bytes:
            self._refuse(HeadersTooLarge(f"The request's head is larger than {self._limits.max_header_bytes} bytes."))
        elif self._is_between_requests() and self._head_clock is None:
            self._start_head_clock()
        return not self.pipeline

    def _drops_chunks(self) -> bool:
        """Whether the reply came before its request was read: parsing chunks of one byte would waste time."""
        cycle = self.cycle
        return (
            cycle is not None
            and cycle.response_started
            and cycle.more_body
            and not cycle.keep_alive
            and any(name == b"transfer-encoding" for name, _ in self.headers)
        )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._silent_since = self._pauses.now()
        if not self.pipeline:
            self._intake.go_on()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, unless the client's next request could not be read meanwhile."""
        left = self.timeout_keep_alive - self._pauses.silence(self._silent_since)
        if left > _TIMER_SECONDS:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = self._wire_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are dropped: they come after the checks of headers
            super().on_header(name, value.strip(b" \t"))  # the white space around a value is no part of it

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_clock()
        self._plain_bytes = declared_bytes(self.headers) or 0
        self.scope["state"]["client_side"] = partial(client_side, self.transport)  # checked before expensive work
        self.scope["state"][TRANSPORT] = self.transport
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # such a client knows no interim replies
        before = self.cycle
        self._is_asking = self._is_between_requests()
        super().on_headers_complete()
        # With pipelining, `cycle` is the latest request's; the ones before it are answered first.
        self._unanswered = [cycle for cycle in (*self._unanswered, before) if cycle and not cycle.response_complete]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._has_turn or cycle.scope["method"] in _BODILESS_METHODS or self._turns.is_free():
            self._begin(cycle, app)
        else:
            self._turns.wait(partial(self._begin, cycle, app))

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        refused = self._refused_at_once(cycle)
        if refused is None:
            put_arrival(cast(Scope, cycle.scope), Arrival(self._pauses, self._turns, lambda: not cycle.more_body))
            own_app: Any = until_close(app, cycle) if cycle.scope["http_version"] == "1.0" else app
            super()._start_asgi_task(cycle, own_app)
            return
        # The body, of which some bytes may still come, is skipped as that of any request that has its reply.
        cycle.response_started = cycle.response_complete = True
        head = b"".join(b"%b: %b\r\n" % line for line in (*self.server_state.default_headers, *refused.headers))
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[refused.status], head, refused.body))
        self.on_response_complete()

    def _refused_at_once(self, cycle: RequestResponseCycle) -> Refused | None:
        """The refusal of a request for which no task is needed.

        It is written at once: not within another reply, nor behind many that the client does not read.
        """
        is_asking, self._is_asking = self._is_asking, False
        door = self._door() if is_asking and cycle.keep_alive and not cycle.disconnected else None
        if door is None or self.transport.get_write_buffer_size() > _UNREAD_BYTES:
            return None
        return door.refuse(cast(Scope, cycle.scope))

    def on_body(self, body: bytes) -> None:
        self._plain_bytes = max(0, self._plain_bytes - len(body))
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg, code="invalid_http", headers={"Connection": "close"}))

    @property
    def bytes_waiting(self) -> int:
        """Bytes of replies that the client has not received yet."""
        return 0 if self.transport is None else waiting_bytes(self.transport)

    @property
    def is_stalled(self) -> bool:
        """Whether a reply waits for the client to read."""
        return self._write_clock is not None and self._write_clock.is_waiting

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_clock is None:
            self._write_clock = WriteClock(self.transport, self._limits.write_pace, self.loop, self._pauses)
        self._write_clock.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_clock is not None:
            self._write_clock.stop()

    def _answers_half_closed(self) -> bool:
        """Whether a complete request awaits its reply, and a probe can tell if the client still listens."""
        return (
            not (self._refused or self._in_head or self._is_between_requests())
            and not self.cycle.more_body
            and self.scheme == "http"
            and self.scope["http_version"] != "1.0"
        )

    def _may_probe(self) -> bool:
        return not self.pipeline and not self.cycle.response_started

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_head_clock(self) -> None:
        self._silent_since = self._pauses.now()
        self._head_clock = self.loop.call_later(self._limits.header_timeout, self._head_is_late)

    def _stop_head_clock(self) -> None:
        if self._head_clock is not None:
            self._head_clock.cancel()
            self._head_clock = None

    def _stop_clocks(self) -> None:
        self._stop_head_clock()
        if self._write_clock is not None:
            self._write_clock.stop()
        if self._half_closed is not None:
            self._half_closed.stop()

    def _head_is_late(self) -> None:
        self._head_clock = None
        if self.transport.is_closing() or self._refused:
            return
        if (left := self._limits.header_timeout - self._pauses.silence(self._silent_since)) > _TIMER_SECONDS:
            self._head_clock = self.loop.call_later(left, self._head_is_late)
        elif self._in_head:
            self._refuse(RequestTimeout(f"The request's head took longer than {self._limits.header_timeout:g} s."))
        else:
            self.transport.close()

    def _turn_away(self, error: ApiError) -> None:
        """Refuse a connection above a limit. It does not count as open: refused clients do not keep others out."""
        self.connections.discard(self)
        self._addresses.leave(self._place)
        self._place = None
        if len(self._turned_away) < self._limits.max_connections:
            self._turned_away.add(self)
            self._refuse(error)
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Send an error without the application, and close once the client has had time to read it."""
        self._refused = True
        self._stop_head_clock()
        self._unset_keepalive_if_required()
        unanswered = [cycle for cycle in (*self._unanswered, self.cycle) if cycle and not cycle.response_complete]
        self.pipeline.clear()
        for cycle in unanswered:  # what they would send has no place behind the error
            cycle.disconnected = True
            cycle.message_event.set()
        if any(cycle.response_started for cycle in unanswered):
            self.transport.close()
            return
        body = json.dumps(error_body(error), separators=(",", ":"), ensure_ascii=False).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": choose_request_id(()),
            **{name.lower(): value for name, value in error.headers.items()},
            "connection": "close",
        }
        lines = [*self.server_state.default_headers, *((k.encode(), v.encode()) for k, v in headers.items())]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in lines)
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def until_close(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for one HTTP/1.0 request: where a reply's length is not known, the connection's end is its end.

    Such a client knows no chunks. Its connection is closed after each reply anyway.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_open_ended = False

        async def send_plain(message: Message) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_open_ended:
                    cycle.chunked_encoding = False
            elif is_open_ended:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer


LOOPBACK = ("127.0.0.0/8", "::1")  # proxies on this machine
_PREFIX = 64  # length of an IPv6 network prefix, which a client cannot choose


class Addresses:
    """Counts open connections by address, for IPv6 by network, so that one client cannot take all connections.

    Trusted proxies, this machine and Unix sockets are not counted, since many clients may be behind them.
    """

    def __init__(self, most: int, uncounted: Iterable[str] = ()) -> None:
        self._most = most
        self._uncounted = [ip_network(name) for name in (*LOOPBACK, *uncounted)]
        self._open: dict[str, int] = {}

    def enter(self, host: str | None) -> tuple[str | None, bool]:
        """The key to pass to `leave` when the connection ends, and whether it is above the limit."""
        place = self._place(host)
        if place is None:
            return None, False
        number = self._open[place] = self._open.get(place, 0) + 1
        return place, number > self._most

    def leave(self, place: str | None) -> None:
        if place is None:
            return
        number = self._open.pop(place) - 1
        if number:
            self._open[place] = number

    def _place(self, host: str | None) -> str | None:
        try:
            address = ip_address((host or "").partition("%")[0])
        except ValueError:
            return None  # a Unix socket, or a test without one
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        if any(address in network for network in self._uncounted):
            return None
        if isinstance(address, IPv6Address):
            return str(ip_network((address, _PREFIX), strict=False))
        return str(address)


PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_SECONDS = 5.0  # between probes
ClientSide = Literal["open", "ended", "gone"]  # ended: the client has left, or has sent its last request
_ENDED = getattr(select, "POLLRDHUP", 0)  # not on every system
_FIRST_LOOK = 0.001  # seconds from a probe to the first look; the pause doubles with each look
_LONGEST_PAUSE = 0.25


class HalfClosedWatch:
    """Watches a half-closed connection, and aborts it when the client has left.

    A client that has left and a client that has sent its last request look the same at first: the client's side of the
    connection ends. But data written to a closed TCP connection is answered by a reset, and then the system reports a
    hang-up. Before the reply has begun HTTP allows interim responses, so a `100 Continue` is written, which clients
    ignore; later the parts of the reply have the same effect. HTTP/1.0 has no interim responses and TLS has no
    half-closed connections: there, the end means that the client has left.
    """

    def __init__(self, transport: asyncio.Transport, *, may_probe: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_probe = may_probe
        self._loop = asyncio.get_running_loop()
        self._probe_at = 0.0  # the loop's time
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._look(_FIRST_LOOK)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, pause: float) -> None:
        if self._transport.is_closing():
            return
        if is_hung_up(self._transport):
            self._transport.abort()
            return
        if self._loop.time() >= self._probe_at and self._may_probe():
            self._probe_at = self._loop.time() + PROBE_SECONDS
            self._transport.write(PROBE)
            pause = _FIRST_LOOK
        self._timer = self._loop.call_later(pause, self._look, min(2 * pause, _LONGEST_PAUSE))


def is_hung_up(transport: asyncio.Transport) -> bool:
    """Whether the system reports that nothing can be sent any more."""
    return client_side(transport) == "gone"


def client_side(transport: asyncio.Transport) -> ClientSide:
    """The state of the client's side as the system knows it, perhaps before the event loop does."""
    if transport.is_closing():
        return "gone"
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _ENDED)  # hang-ups and errors are always reported
    found = poll.poll(0)
    if not found:
        return "open"
    return "ended" if found[0][1] == _ENDED else "gone"


SLICE_BYTES = 4 << 10  # 200 of the shortest requests, or 700 chunks of one byte: a few milliseconds
TURN_SECONDS = 0.005


class Intake(FlowControl):
    """Flow control that pauses reading while bytes that were read are not parsed yet.

    A read brings up to 256 KiB: a part of one body, or forty thousand chunks of one byte, or ten thousand pipelined
    requests. Bytes are parsed in slices; between slices that take long the event loop has a turn. Nothing is parsed
    behind a pipelined request that waits for its turn.
    """

    def __init__(
        self, transport: asyncio.Transport, parse: Callable[[bytes], bool], plain_bytes: Callable[[], int]
    ) -> None:
        """`parse` returns whether more may be parsed now; if not, call `go_on` when it may.

        `plain_bytes`: the next bytes that are cheap to parse at once, however many they are.
        """
        super().__init__(transport)
        self._parse = parse
        self._plain_bytes = plain_bytes
        self._loop = asyncio.get_running_loop()
        self._left = b""
        self._turn: asyncio.Handle | None = None

    def resume_reading(self) -> None:
        if not self._left:
            super().resume_reading()

    def take(self, data: bytes) -> None:
        """Parse bytes that have arrived, or keep them for later."""
        if self._left:
            self._left += data  # from a read that was under way
            return
        self._feed(data)

    @property
    def is_keeping(self) -> bool:
        """Whether bytes have arrived that are not parsed yet."""
        return bool(self._left)

    def keep(self, data: bytes) -> None:
        """Keep bytes until `go_on` or `go_on_now`, and read no more until then."""
        self._left += data
        self.pause_reading()

    def go_on_now(self) -> None:
        """Parse the remaining bytes."""
        if self._turn is not None:
            self._turn.cancel()
        if self._left:
            self._take_turn()

    def go_on(self) -> None:
        """Parse the remaining bytes when the event loop is free."""
        if self._left and self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def stop(self) -> None:
        """Drop the remaining bytes."""
        self._left = b""
        if self._turn is not None:
            self._turn.cancel()

    def _take_turn(self) -> None:
        self._turn = None
        data, self._left = self._left, b""
        self._feed(data)
        if not self._left:
            self.resume_reading()

    def _feed(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES:
            self._parse(data)
            return
        due = self._loop.time() + TURN_SECONDS
        end = 0
        while end < len(data):
            start, end = end, end + max(SLICE_BYTES, self._plain_bytes())
            may_go_on = self._parse(data[start:end])
            if end < len(data) and (not may_go_on or self._loop.time() > due):
                self._left = data[end:]
                self.pause_reading()
                if may_go_on:
                    self.go_on()
                return
