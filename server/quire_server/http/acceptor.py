"""Accepts connections: one on which a request without a body comes is opened at once, all others have their turns.

Promises: a probe waits for no request that came before it, also on a connection of its own; few files are open for what
waits. Must not know: routes, requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from quire_server.http.turns import Turns

BACKLOG = 2048  # connections that wait to be accepted, and as many that wait for their turn
BODILESS = (b"GET ", b"HEAD ")
_FIRST_BYTES = 5  # enough for one of these
_AT_ONCE = 256  # connections that are looked at in one turn of the loop, a few milliseconds
_OPENED_AT_ONCE = 8
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_SECONDS = 0.5  # until it is tried again where no file can be opened

log = logging.getLogger(__name__)


class Acceptor:
    """Accepts on one listening socket from `begin` to `close`.

    The system hands out connections in the order in which they came, and each one that is opened costs some hundred
    microseconds before anything can be read. So they are told apart by their first bytes before that; one that waits
    is opened as soon as such bytes come.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[bool], asyncio.Protocol],
        *,
        turns: Turns,
        tls: ssl.SSLContext | None,
        most_waiting: int,
    ) -> None:
        """`protocol`: called for each connection, with whether its first request has had its turn.

        `most_waiting`: connections that may wait here for their turn; further ones wait in the system.
        """
        self._sock, self._protocol, self._turns = sock, protocol, turns
        self._tls, self._most_waiting = tls, most_waiting
        self._loop = asyncio.get_running_loop()
        self._waiting: set[socket.socket] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._is_reading = self._is_closed = False

    def begin(self) -> None:
        """Listen, and accept from now on."""
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._read()

    def close(self) -> None:
        """Accept no more, and drop who waits: nothing of their requests was read."""
        self._is_closed = True
        self._stop_reading()
        if self._pause is not None:
            self._pause.cancel()
        for sock in tuple(self._waiting):
            self._take_out(sock)
            sock.close()

    async def wait_closed(self) -> None:
        """End the handshakes that are under way."""
        opening = tuple(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)

    def _read(self) -> None:
        if not self._is_reading and not self._is_closed and self._pause is None:
            self._is_reading = True
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock.fileno())

    def _accept(self) -> None:
        """Take in what has come, a bounded number; the rest is there in the next turn."""
        opened = 0
        for _ in range(_AT_ONCE):
            if opened == _OPENED_AT_ONCE:
                return
            if len(self._waiting) >= self._most_waiting > 0:
                self._stop_reading()
                return
            try:
                sock, _address = self._sock.accept()
            except OSError as error:  # none is left, or its client has left
                if error.errno in _NO_FILES:
                    self._rest(error)
                return
            sock.setblocking(False)
            first = _first_bytes(sock)
            if self._tls is not None or not self._most_waiting or first.startswith(BODILESS) or self._turns.is_free():
                opened += 1
                self._open(sock, first)
                continue
            self._waiting.add(sock)
            self._turns.wait(partial(self._let_in, sock))
            if not first:
                self._loop.add_reader(sock, self._has_spoken, sock)

    def _rest(self, error: OSError) -> None:
        log.error("no connection can be accepted: %s", error.strerror)
        self._stop_reading()
        self._pause = self._loop.call_later(_PAUSE_SECONDS, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._read()

    def _has_spoken(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock)
        if _first_bytes(sock).startswith(BODILESS):
            self._let_in(sock)

    def _let_in(self, sock: socket.socket) -> None:
        if sock in self._waiting:
            self._take_out(sock)
            self._open(sock, _first_bytes(sock))
            self._read()

    def _take_out(self, sock: socket.socket) -> None:
        self._waiting.discard(sock)
        self._loop.remove_reader(sock)

    def _open(self, sock: socket.socket, first: bytes) -> None:
        has_turn = self._tls is None and bool(first) and not first.startswith(BODILESS)
        task = self._loop.create_task(self._opened(sock, has_turn))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _opened(self, sock: socket.socket, has_turn: bool) -> None:
        with contextlib.suppress(OSError):  # the client has left, or its handshake has failed
            try:
                await self._loop.connect_accepted_socket(partial(self._protocol, has_turn), sock, ssl=self._tls)
            except BaseException:
                sock.close()
                raise


def _first_bytes(sock: socket.socket) -> bytes:
    """Return what has come, without taking it; nothing where nothing has come, or the client has left."""
    try:
        return sock.recv(_FIRST_BYTES, socket.MSG_PEEK)
    except OSError:
        return b""
