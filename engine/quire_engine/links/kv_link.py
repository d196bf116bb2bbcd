"""A connection between two engines that pass KV blocks on: handshake, questions of one side, blocks of the other.

The wire, after the handshake of `handshake`: each side sends the name of its layout, 32 bytes. Then questions go one
way, FETCH (with keys), CANCEL or STAY, and answers the other, BLOCK (with a digest and the payload) or MISS. All
numbers are little-endian. Promises: nothing is decoded before the peer has proven itself; every length is bounded; a
digest covers the layout, the key and the place of a block, under a key of this connection alone. Must not know: torch,
requests.
"""

from __future__ import annotations

import hmac
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from select import POLLIN, poll

from quire_engine.contract.block_store import MOST_FETCHED
from quire_engine.links.handshake import HELLO_BYTES, TO_ENGINE, Refused, check_hello, hello, session_key
from quire_engine.links.link_security import LinkSecurity

KEY_BYTES = DIGEST_BYTES = 32
FETCH, CANCEL, STAY, BLOCK, MISS = range(1, 6)
HANDSHAKE_SECONDS = 5.0
STUCK_SECONDS = 10.0  # in which a peer takes or sends nothing of a message that has begun; then it is given up
_QUESTION = struct.Struct("<BIBH")  # kind, fetch, flags, number of keys, which follow
_ANSWER = struct.Struct("<BIH")  # kind, fetch, index of the key; of a block, digest and payload follow
_IS_COMPUTED = 1


class Closed(Exception):
    """The connection is over; the text says why."""


class KVLink:
    """One end, used by one thread. `wake` may be called by any."""

    _questions = frozenset({FETCH, CANCEL, STAY})

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._woken, self._waker = socket.socketpair()
        for each in (self._woken, self._waker):
            each.setblocking(False)
        self._poll = poll()
        self._key = self._layout = b""
        self._deadline: float | None = time.monotonic() + HANDSHAKE_SECONDS  # of the handshake; None: it is through

    # ---------------------------------------------------------------- handshake

    def admit(self, security: LinkSecurity, layout: bytes) -> None:
        """The side that was connected to. Raises Closed, Refused, OSError."""
        self._secure(security.listening, is_server=True)
        own, theirs = self._greet()
        self._agree(session_key(own, theirs), layout)

    def introduce(self, security: LinkSecurity, layout: bytes) -> None:
        """The side that has connected. Raises Closed, Refused, OSError."""
        self._secure(security.connecting, is_server=False)
        own, theirs = self._greet()
        self._agree(session_key(theirs, own), layout)

    def _secure(self, context: ssl.SSLContext | None, *, is_server: bool) -> None:
        self._socket.settimeout(HANDSHAKE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self._socket = context.wrap_socket(self._socket, server_side=is_server)
        self._poll.register(self._socket, POLLIN)
        self._poll.register(self._woken, POLLIN)

    def _greet(self) -> tuple[bytes, bytes]:
        """Exchange first messages; returns this side's and the other one's. Raises Refused."""
        own = hello(TO_ENGINE)
        self._socket.sendall(own)
        theirs = self._exactly(HELLO_BYTES)
        check_hello(theirs, TO_ENGINE)
        return own, theirs

    def _agree(self, key: bytes, layout: bytes) -> None:
        """Check that both sides have blocks of one layout. Raises Refused."""
        self._socket.sendall(layout)
        if not hmac.compare_digest(self._exactly(len(layout)), layout):
            raise Refused("its blocks are of another model, another layout, other numerics or come another way")
        self._key, self._layout, self._deadline = key, layout, None
        self._socket.settimeout(STUCK_SECONDS)

    def _exactly(self, size: int) -> bytes:
        taken = bytearray(size)
        self._fill(memoryview(taken))
        return bytes(taken)

    # ---------------------------------------------------------------- waiting

    def wake(self) -> None:
        """Let `ready` return."""
        with suppress(OSError):  # full, so that it wakes anyway; or closed
            self._waker.send(b"\0")

    def ready(self, seconds: float) -> bool:
        """Wait until something can be read, `wake` was called, or the time is over; whether something can be read."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        found = {number for number, _ in self._poll.poll(seconds * 1000)}
        if self._woken.fileno() in found:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        return self._socket.fileno() in found

    @property
    def has_room(self) -> bool:
        """Whether a further block may be sent now; if not, a question will make room."""
        return True

    def close(self) -> None:
        """Idempotent; called by the link's own thread."""
        for each in (self._socket, self._woken, self._waker):
            with suppress(OSError):
                each.close()

    def shut(self) -> None:
        """End the connection from another thread, whose reads and writes then fail."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.wake()

    # ---------------------------------------------------------------- questions

    def ask(self, kind: int, fetch: int = 0, keys: tuple[bytes, ...] = (), *, is_computed: bool = False) -> None:
        """Send a question. Raises OSError."""
        flags = _IS_COMPUTED if is_computed else 0
        self._socket.sendall(_QUESTION.pack(kind, fetch, flags, len(keys)) + b"".join(keys))

    def question(self) -> tuple[int, int, tuple[bytes, ...], bool]:
        """Read a question that has begun to come: kind, fetch, keys, is_computed. Raises Closed, OSError."""
        kind, fetch, flags, count = _QUESTION.unpack(self._exactly(_QUESTION.size))
        if kind not in self._questions or count > MOST_FETCHED or (count and kind != FETCH):
            raise Closed("it asks what no engine asks")
        keys = self._exactly(count * KEY_BYTES)
        each = tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
        return kind, fetch, each, bool(flags & _IS_COMPUTED)

    # ---------------------------------------------------------------- blocks

    def send_block(self, fetch: int, index: int, key: bytes, payload: bytes) -> None:
        """Send a block with its digest. Raises OSError."""
        self._socket.sendall(self._introduced(fetch, index, key, payload))
        self._socket.sendall(payload)

    def _introduced(self, fetch: int, index: int, key: bytes, payload: bytes) -> bytes:
        """The bytes before a block: its place, and the digest."""
        return _ANSWER.pack(BLOCK, fetch, index) + self._digest(fetch, index, key, payload)

    def send_miss(self, fetch: int, index: int) -> None:
        """Tell that neither this block nor those behind it will come. Raises OSError."""
        self._socket.sendall(_ANSWER.pack(MISS, fetch, index))

    def answer(self, num_bytes: int, meanwhile: Callable[[], None]) -> tuple[int, int, int, bytes, bytearray]:
        """Read an answer that has begun to come: kind, fetch, index, digest, payload of `num_bytes`.

        `meanwhile` is called after each call of `wake`. Raises Closed, OSError.
        """
        kind, fetch, index = self._answered()
        if kind == MISS:
            return kind, fetch, index, b"", bytearray()
        digest, payload = self._exactly(DIGEST_BYTES), bytearray(num_bytes)
        self._fill(memoryview(payload), meanwhile)
        return kind, fetch, index, digest, payload

    def _answered(self) -> tuple[int, int, int]:
        """Kind, fetch and index of an answer. Raises Closed, OSError."""
        kind, fetch, index = _ANSWER.unpack(self._exactly(_ANSWER.size))
        if kind not in {BLOCK, MISS}:
            raise Closed("it answers what no engine answers")
        return kind, fetch, index

    def is_whole(self, fetch: int, index: int, key: bytes, digest: bytes, payload: bytearray) -> bool:
        """Whether the payload is that of this key, as the peer has sent it."""
        return hmac.compare_digest(digest, self._digest(fetch, index, key, payload))

    def _digest(self, fetch: int, index: int, key: bytes, payload: bytes | bytearray) -> bytes:
        digest = hmac.new(self._key, self._layout + key + _ANSWER.pack(BLOCK, fetch, index), "sha256")
        digest.update(payload)
        return digest.digest()

    def _fill(self, view: memoryview, meanwhile: Callable[[], None] | None = None) -> None:
        """Read until the view is full. Raises Closed where the peer has gone, or sends nothing for too long."""
        at, deadline = 0, time.monotonic() + STUCK_SECONDS
        while at < len(view):
            if meanwhile is not None:
                while not self.ready(1.0):
                    meanwhile()
                    if time.monotonic() > deadline:
                        raise Closed("it has stopped in the middle of a block")
            if self._deadline is not None:
                self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
            count = self._socket.recv_into(view[at:])
            if not count:
                raise Closed("it has closed the connection")
            at, deadline = at + count, time.monotonic() + STUCK_SECONDS
