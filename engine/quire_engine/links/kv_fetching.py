"""Fetches KV blocks from other engines: a thread for each of them, beside the steps.

Promises: what arrives has the digest of its key; a peer that cannot be reached, lies, stops or goes away makes what is
fetched there misses, at once or when the fetch is cancelled; what has come and is not taken is bounded. Must not know:
torch, requests, the scheduler.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from quire_engine.contract.block_store import Payload
from quire_engine.contract.errors import ConfigError
from quire_engine.links.handshake import Refused
from quire_engine.links.kv_link import BLOCK, CANCEL, FETCH, STAY, Closed, KVLink
from quire_engine.links.link_security import LinkSecurity

MOST_ARRIVED = 16 << 20  # bytes that have come and are not taken: more would keep running streams from their next step
CONNECT_SECONDS = 2.0
RETRY_SECONDS = 1.0  # after a connection that failed, in which fetches miss at once
_STAY_SECONDS = 2.0  # between two signs of life
_IDLE_SECONDS = 120.0  # without a fetch, until a connection is ended
_LOOK_SECONDS = 0.5
_WEIGHT = 0.2  # of the newest block in the mean time of one

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Fetch:
    number: int
    name: str
    keys: tuple[bytes, ...]
    is_computed: bool
    at: int = 0  # keys that have come


@dataclass(slots=True, eq=False)
class _Peer:
    """Another engine. All fields are guarded by the fetcher's condition."""

    address: str
    fetches: dict[int, _Fetch] = field(default_factory=dict)
    questions: deque[tuple[int, _Fetch]] = field(default_factory=deque)  # not asked yet
    link: KVLink | None = None
    runs: bool = False  # its thread
    retry_at: float = 0.0
    block_seconds: float = 0.0  # of reading one from the wire, the mean of the latest; 0: none was read yet


class Fetcher:
    """The fetches of this engine, by name."""

    def __init__(
        self, num_bytes: int, security: LinkSecurity, *, link: Callable[[socket.socket], KVLink] = KVLink
    ) -> None:
        """`num_bytes`: of a block; `link`: how blocks travel. Nothing is fetched before `layout` is set."""
        self.layout = b""  # the name of what the bytes depend on beside the tokens
        self.num_received = self.num_missed = self.num_refused = 0
        self._num_bytes, self._security, self._link = num_bytes, security, link
        self._changed = threading.Condition()  # guards all below; never held while a socket works
        self._peers: dict[str, _Peer] = {}
        self._by_name: dict[str, tuple[_Peer, _Fetch]] = {}
        self._arrived: deque[tuple[_Fetch, bytes, Payload | None]] = deque()
        self._arrived_bytes = 0
        self._numbers = count(1)
        self._closed = False

    # ---------------------------------------------------------------- the engine's thread

    def fetch(self, name: str, address: str, keys: Sequence[bytes], *, is_computed: bool) -> None:
        """See `block_store.BlockPeers`."""
        with self._changed:
            peer = self._peers.setdefault(address, _Peer(address))
            fetch = _Fetch(next(self._numbers) & 0xFFFFFFFF, name, tuple(keys), is_computed)
            self._by_name[name] = peer, fetch
            if self._closed or not self.layout or time.monotonic() < peer.retry_at:
                self._miss(peer, fetch)
                return
            peer.fetches[fetch.number] = fetch
            self._ask(peer, FETCH, fetch)
            if not peer.runs:
                peer.runs = True
                threading.Thread(target=self._work, args=(peer,), name="kv fetcher", daemon=True).start()

    def block_seconds(self, address: str) -> float:
        """See `block_store.BlockPeers`."""
        with self._changed:
            peer = self._peers.get(address)
            return 0.0 if peer is None else peer.block_seconds

    def take(self) -> list[tuple[bytes, Payload | None]]:
        """The contents that have come, of fetches that were not cancelled; see `block_store.BlockPeers`."""
        if not self._arrived:
            return []
        with self._changed:
            taken = [(key, payload) for _, key, payload in self._arrived]
            self._arrived.clear()
            self._arrived_bytes = 0
            self._changed.notify_all()
        return taken

    def cancel(self, name: str) -> None:
        """See `block_store.BlockPeers`."""
        with self._changed:
            peer, fetch = self._by_name.pop(name, (None, None))
            if peer is None or fetch is None:
                return
            if peer.fetches.pop(fetch.number, None) is not None:
                self.num_missed += len(fetch.keys) - fetch.at
                self._ask(peer, CANCEL, fetch)
            if any(of is fetch for of, _, _ in self._arrived):
                self._arrived = deque(each for each in self._arrived if each[0] is not fetch)
                self._arrived_bytes = sum(len(each[2] or b"") for each in self._arrived)
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until something has come, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived, seconds)

    def close(self) -> None:
        """End all connections. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for peer in self._peers.values():
                if peer.link is not None:
                    peer.link.shut()

    # ---------------------------------------------------------------- threads

    def _ask(self, peer: _Peer, kind: int, fetch: _Fetch) -> None:
        peer.questions.append((kind, fetch))
        if peer.link is not None:
            peer.link.wake()

    def _miss(self, peer: _Peer, fetch: _Fetch) -> None:
        """Nothing more comes of this fetch; called under the condition."""
        missing = fetch.keys[fetch.at :]
        self.num_missed += len(missing)
        peer.fetches.pop(fetch.number, None)
        self._arrived.extend((fetch, key, None) for key in missing)
        self._changed.notify_all()

    def _work(self, peer: _Peer) -> None:
        """The life of one connection, as long as there are fetches."""
        link, why = None, ""
        try:
            link = self._link(self._connected(peer.address))
            link.introduce(self._security, self.layout)
            with self._changed:
                peer.link = link
            if self._follow(peer, link):
                link.close()
                return
        except (Closed, Refused, ConfigError, OSError, ValueError) as error:  # a name that is none is a ValueError
            why = getattr(error, "strerror", None) or str(error)
        except Exception as error:  # a bug: the requests that wait for these blocks compute them
            _log.exception("fetching KV blocks of the engine at %s has failed", peer.address)
            why = type(error).__name__
        with self._changed:
            peer.link = None
            if why:
                _log.warning("KV blocks of the engine at %s cannot be had: %s", peer.address, why)
                peer.retry_at = time.monotonic() + RETRY_SECONDS
            peer.runs = False
            peer.questions.clear()
            for fetch in list(peer.fetches.values()):
                self._miss(peer, fetch)
        if link is not None:
            link.close()

    def _connected(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        self._security.check_reach(f"the engine at {address}", [str(each[4][0]) for each in found])
        return socket.create_connection((str(found[0][4][0]), int(port)), timeout=CONNECT_SECONDS)

    def _follow(self, peer: _Peer, link: KVLink) -> bool:
        """Ask and read until there has been nothing to do for a while: then True, and the peer has no thread any more.

        False: all fetches end. Raises Closed, OSError.
        """
        told = busy = time.monotonic()

        def tell() -> None:
            nonlocal told
            while True:
                with self._changed:
                    if not peer.questions:
                        has_fetches = bool(peer.fetches)
                        break
                    kind, fetch = peer.questions.popleft()
                link.ask(kind, fetch.number, fetch.keys if kind == FETCH else (), is_computed=fetch.is_computed)
                told = time.monotonic()
            if has_fetches and time.monotonic() > told + _STAY_SECONDS:
                link.ask(STAY)
                told = time.monotonic()

        while True:
            tell()
            with self._changed:
                if self._closed:
                    return False
                if peer.fetches:
                    busy = time.monotonic()
                elif not peer.questions and time.monotonic() > busy + _IDLE_SECONDS:
                    peer.link, peer.runs = None, False
                    return True
                if self._arrived_bytes >= MOST_ARRIVED:  # nothing is read meanwhile, so the sender waits
                    self._changed.wait(_LOOK_SECONDS)
                    continue
            if link.ready(_LOOK_SECONDS):
                self._receive(peer, link, tell)

    def _receive(self, peer: _Peer, link: KVLink, tell: Callable[[], None]) -> None:
        began = time.perf_counter()
        kind, number, index, digest, payload = link.answer(self._num_bytes, tell)
        seconds = time.perf_counter() - began
        with self._changed:
            if kind == BLOCK:  # of a fetch that is cancelled too: that may be so since the wire is slow
                known = peer.block_seconds
                peer.block_seconds = known + _WEIGHT * (seconds - known) if known else seconds
            fetch = peer.fetches.get(number)
        if fetch is None:
            return  # cancelled
        if index != fetch.at:
            raise Closed("it answers in another order than it was asked")
        key = fetch.keys[index]
        is_good = kind == BLOCK and link.is_whole(number, index, key, digest, payload)
        with self._changed:
            if number not in peer.fetches:
                return
            if not is_good:
                if kind == BLOCK:
                    self.num_refused += 1
                    _log.warning("a KV block of the engine at %s was damaged on its way: it is computed", peer.address)
                    self._ask(peer, CANCEL, fetch)
                self._miss(peer, fetch)
                return
            fetch.at += 1
            self.num_received += 1
            self._arrived.append((fetch, key, payload))
            self._arrived_bytes += len(payload)
            if fetch.at == len(fetch.keys):
                del peer.fetches[number]
            self._changed.notify_all()
