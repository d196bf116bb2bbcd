"""A light HTTP client for streamed completions: httptools on a bare asyncio protocol, connections kept.

Promises: a few microseconds per chunk, as the load generator shares the machine with the server; whatever a server does
ends in a `Record`, never in an exception.
"""

from __future__ import annotations

import asyncio
import ssl
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from quire_bench.records import OK, Record

_DETAIL = 500  # characters kept of a server's complaint
_DONE = b"data: [DONE]"


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Client:
    """Sends bodies to one address. `close()` when done."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout = timeout
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\n{key}Content-Length: "
        ).encode()
        self._idle: list[_Connection] = []

    async def send(self, body: bytes, record: Record) -> None:
        """Send a request and wait until the reply has ended. Everything that happened is in the record."""
        message = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        while True:
            connection, was_used = self._idle_connection(), True
            if connection is None:
                was_used = False
                try:
                    connection = await self._connect()
                except OSError as error:
                    record.outcome, record.detail = "unreachable", str(error)[:_DETAIL]
                    record.ended = perf_counter()
                    return
            await connection.exchange(message, record, seconds=self._timeout)
            # The server may have closed an idle connection just then: that is nobody's failure.
            if not (was_used and connection.is_stale):
                break
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def _idle_connection(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(self._timeout):
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port, ssl=self._ssl
            )
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._now = 0.0
        self.is_reusable = False
        self.is_stale = False  # the peer was gone before it saw the request

    async def exchange(self, message: bytes, record: Record, *, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._record = record
        self._status = 0
        self._tail = b""
        self._complaint = b""
        self._error = ""
        self._is_done = False
        self._is_silent = True
        self.is_reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._ended = loop.create_future()
        timer = loop.call_later(seconds, self._end, "timeout", f"no end after {seconds:g} s")
        assert self._transport is not None
        record.sent = perf_counter()
        self._transport.write(message)
        try:
            await self._ended
        finally:
            timer.cancel()

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def _end(self, outcome: str, detail: str = "") -> None:
        if self._ended is None or self._ended.done():
            return
        record = self._record
        record.ended = perf_counter()
        record.outcome, record.detail = outcome, detail[:_DETAIL]
        self._ended.set_result(None)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        self._is_silent = False
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end("broken", f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if self._ended is None or self._ended.done():
            return
        self.is_stale = self._is_silent
        self._finish(f"connection lost: {exc or 'closed by the server'}")

    # -- httptools

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._complaint += body
            return
        lines = (self._tail + body).split(b"\n") if self._tail else body.split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if line.startswith(_DONE):
                self._is_done = True
            elif b'"usage"' in line or b'"error"' in line:  # the last ones, mostly
                self._read_event(line)
            else:
                self._record.arrivals.append(self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.is_reusable = self._parser.should_keep_alive()
        self._finish("the reply has no output")

    # -- the end of a reply

    def _read_event(self, line: bytes) -> None:
        record = self._record
        try:
            event = _decode_event(line[5:])
        except msgspec.MsgspecError as error:
            self._error = f"not a chunk: {error}"
            return
        if event.error is not None:
            self._error = bytes(event.error).decode(errors="replace")
        if event.usage is not None:
            record.input_tokens = event.usage.prompt_tokens or record.input_tokens
            record.output_tokens = event.usage.completion_tokens
        if event.choices:
            record.arrivals.append(self._now)

    def _finish(self, otherwise: str) -> None:
        """The reply is over; `otherwise` is what it was if it was no complete one."""
        record = self._record
        if self._status not in {0, 200}:
            self._end(f"http_{self._status}", self._complaint.decode(errors="replace"))
        elif self._error:
            self._end("error_event", self._error)
        elif self._is_done and record.arrivals:
            record.output_tokens = record.output_tokens or record.asked_tokens
            self._end(OK)
        else:
            self._end("broken", otherwise)
