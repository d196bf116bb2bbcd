"""Lends KV blocks of this engine's pool to other engines: a thread for each connection, beside the steps.

Promises: a block that is sent held its content until all of it was copied; what others wait for is leased, which ends
with their fetch, with their connection, and 10 s after their last sign of life; the memory for leases is bounded. Must
not know: requests, the scheduler.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from quire_engine.contract.errors import ConfigError
from quire_engine.execution.kv.pool_rows import PoolRows
from quire_engine.links.handshake import Refused
from quire_engine.links.kv_link import CANCEL, FETCH, Closed, KVLink
from quire_engine.links.link_security import LinkSecurity
from quire_engine.own_pauses import OwnPauses

LEASE_SECONDS = 10.0  # without a sign of life of the one who fetches
MOST_LEASED = 64 << 20  # bytes that are copied for others because the pool needed their place
MOST_LINKS = 64
MOST_FETCHES = 256  # of one connection
_IDLE_SECONDS = 300.0  # of a connection without a fetch
_LOOK_SECONDS = 1.0

MakeLink = Callable[[socket.socket], KVLink]
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lent:
    """A fetch of another engine."""

    keys: tuple[bytes, ...]
    is_computed: bool  # what is not there will come
    at: int = 0  # keys that are sent


class Lender:
    """The blocks that can be had, and the connections of those who fetch them."""

    def __init__(
        self, rows: PoolRows, listening: socket.socket, security: LinkSecurity, *, link: MakeLink = KVLink
    ) -> None:
        """`rows`: of the pool on the host; `link`: how blocks travel. No peer is let in before `layout` is set."""
        self.layout = b""  # the name of what the bytes depend on beside the tokens
        self.num_sent = 0
        self._rows, self._listening, self._security, self._link = rows, listening, security, link
        self._guard = threading.Lock()  # over all below, and the copy of a block: as long as one is copied
        self._held: dict[bytes, int] = {}  # by key: the block of the pool
        self._wanted: dict[bytes, list[KVLink]] = {}  # by key: a link for each fetch that waits for it
        self._copies: dict[bytes, bytes] = {}  # of wanted contents that the pool has lost
        self._copied_bytes = 0
        self._links: set[KVLink] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="kv accept", daemon=True).start()

    @property
    def num_leased(self) -> int:
        """Contents that others have asked for and that are not sent yet."""
        return len(self._wanted)

    # ---------------------------------------------------------------- the engine's thread

    def offer(self, key: bytes, block: int) -> None:
        """The block has this content until `lose`."""
        with self._guard:
            self._held[key] = block
            waiting = self._wanted.get(key, ()) if self._wanted else ()
        for link in waiting:
            link.wake()

    def lose(self, key: bytes) -> None:
        """The content is about to be written over: a copy stays if a fetch waits for it, and there is room."""
        with self._guard:
            block = self._held.pop(key, None)
            if block is None or key not in self._wanted or key in self._copies:
                return
            size = self._rows.num_bytes
            if self._copied_bytes + size <= MOST_LEASED:
                self._copies[key] = self._rows.content(block)
                self._copied_bytes += size

    def clear(self) -> None:
        """Nothing that was offered may be lent any more."""
        with self._guard:
            self._held.clear()
            self._copies.clear()
            self._copied_bytes = 0

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._guard:
            links = list(self._links)
        for link in links:
            link.shut()

    # ---------------------------------------------------------------- connections

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, (host, *_) = self._listening.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("no connection for KV blocks can be accepted: %s", error.strerror or error)
                time.sleep(0.2)
                continue
            try:
                self._let_in(connection, host)
            except Exception:  # such as no more threads
                _log.exception("a connection for KV blocks from %s was refused", host)
                connection.close()

    def _let_in(self, connection: socket.socket, host: str) -> None:
        if not self.layout or len(self._links) >= MOST_LINKS:
            connection.close()
            return
        link = self._link(connection)
        thread = threading.Thread(target=self._serve, args=(link, host), name="kv lender", daemon=True)
        with self._guard:
            self._links.add(link)
        try:
            thread.start()
        except RuntimeError:
            with self._guard:
                self._links.discard(link)
            raise

    def _serve(self, link: KVLink, host: str) -> None:
        """One connection, from the handshake to its end."""
        fetches: dict[int, _Lent] = {}
        try:
            link.admit(self._security, self.layout)
            self._lend(link, fetches)
        except (Closed, Refused, OSError) as end:  # ssl.SSLError is an OSError
            is_end = isinstance(end, Closed)
            _log.log(
                logging.DEBUG if is_end else logging.WARNING, "an engine at %s that fetches KV blocks: %s", host, end
            )
        except Exception:
            _log.exception("lending KV blocks to an engine at %s has failed", host)
        finally:
            for lent in fetches.values():
                self._unlease(link, lent)
            with self._guard:
                self._links.discard(link)
            link.close()

    def _lend(self, link: KVLink, fetches: dict[int, _Lent]) -> None:
        heard, pauses = time.monotonic(), OwnPauses(_LOOK_SECONDS)
        while True:
            has_sent = self._send_each(link, fetches)
            silence = pauses.silence(heard)
            if silence > (LEASE_SECONDS if fetches else _IDLE_SECONDS):
                raise Closed(f"no sign of life for {silence:.0f} s: its leases are over")
            if not link.ready(0.0 if has_sent else _LOOK_SECONDS):
                continue
            kind, number, keys, is_computed = link.question()
            heard = time.monotonic()
            if kind == FETCH:
                if number in fetches or len(fetches) >= MOST_FETCHES or not keys:
                    link.send_miss(number, 0)
                    continue
                fetches[number] = _Lent(keys, is_computed)
                with self._guard:
                    for key in keys:
                        self._wanted.setdefault(key, []).append(link)
            elif kind == CANCEL and number in fetches:
                self._unlease(link, fetches.pop(number))

    def _send_each(self, link: KVLink, fetches: dict[int, _Lent]) -> bool:
        """Send the next block of each fetch, if it is there; whether anything was sent."""
        has_sent = False
        for number, lent in list(fetches.items()):
            if not link.has_room:
                break
            key = lent.keys[lent.at]
            payload = self._content(key)
            if payload is None and lent.is_computed:
                continue
            has_sent = True
            if payload is None:
                self._unlease(link, fetches.pop(number))
                link.send_miss(number, lent.at)
                continue
            index, lent.at = lent.at, lent.at + 1
            with self._guard:
                self._let_go(key, link)
            if lent.at == len(lent.keys):
                del fetches[number]
            self.num_sent += 1
            link.send_block(number, index, key, payload)
        return has_sent

    def _content(self, key: bytes) -> bytes | None:
        # Nothing writes to the block before `lose`, which waits for the guard.
        with self._guard:
            block = self._held.get(key)
            return self._copies.get(key) if block is None else self._rows.content(block)

    def _unlease(self, link: KVLink, lent: _Lent) -> None:
        with self._guard:
            for key in lent.keys[lent.at :]:
                self._let_go(key, link)

    def _let_go(self, key: bytes, link: KVLink) -> None:
        """A fetch waits for this content no more; called under the guard."""
        waiting = self._wanted[key]
        waiting.remove(link)
        if not waiting:
            del self._wanted[key]
            if self._copies.pop(key, None) is not None:
                self._copied_bytes -= self._rows.num_bytes


def listen(address: str, security: LinkSecurity, setting: str) -> socket.socket:
    """A listening socket at HOST:PORT. Raises ConfigError that names the setting."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        security.check_reach(f"{setting} {address}", [str(each[4][0]) for each in found])
        made = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} {address}: {getattr(error, 'strerror', None) or error}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(MOST_LINKS)
    except OSError as error:
        made.close()
        raise ConfigError(f"{setting} {address}: {error.strerror}") from None
    return made
