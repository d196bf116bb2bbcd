"""KV blocks through the memory of processes: the peer reads them from this one's, if it can without its help.

Questions, misses and digests go over the connection of `kv_link` all the same; of a block it carries the place in
memory from which the peer reads. What reads it neither authenticates nor encrypts. Promises: a place is written to
again only when the peer has read it or is gone. Must not know: requests, the scheduler.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from quire_engine.links.kv_link import DIGEST_BYTES, MISS, STAY, Closed, KVLink
from quire_engine.links.link_security import LinkSecurity

_PLACES = 16  # blocks of one connection that the peer may still have to read
_MOST_ABOUT = 1 << 20  # bytes by which a process describes its memory
_READ = 6  # the question that tells that a place was read
_ABOUT = struct.Struct("<IQ")  # length of the process's description, address of the first place


class MemoryAgent(Protocol):
    """Reads the memory of other processes for this one, and lets them read this one's: by any thread.

    Its own errors are of any kind, but that of `read`.
    """

    name: bytes  # a part of the name of the layout: both sides have this transport, or none

    def about(self) -> bytes:
        """The bytes by which a peer can read from this process."""
        ...

    def add(self, memory: Tensor) -> Any:
        """Let memory be read, and read into; the result is for `remove`."""
        ...

    def remove(self, added: Any) -> None: ...
    def meet(self, about: bytes) -> str:
        """The name of a peer."""
        ...

    def part(self, peer: str) -> None: ...
    def read(self, peer: str, source: int, target: Tensor) -> None:
        """Fill `target` from an address of the peer. Raises Closed."""
        ...


class MemoryLink(KVLink):
    """See `KVLink`: a connection whose blocks the peer reads from memory."""

    _questions = KVLink._questions | {_READ}

    def __init__(self, connection: socket.socket, agent: MemoryAgent, num_bytes: int) -> None:
        """`num_bytes`: of a block."""
        super().__init__(connection)
        self._agent, self._num_bytes = agent, num_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)  # [places, num_bytes]
        self._added: Any = None
        self._free: list[int] = []  # places
        self._peer, self._there = "", 0  # name, address of its first place

    def admit(self, security: LinkSecurity, layout: bytes) -> None:
        super().admit(security, layout)
        self._take_memory(_PLACES)
        self._free = list(range(_PLACES))
        about = self._agent.about()
        self._socket.sendall(_ABOUT.pack(len(about), self._memory.data_ptr()) + about)

    def introduce(self, security: LinkSecurity, layout: bytes) -> None:
        super().introduce(security, layout)
        size, self._there = _ABOUT.unpack(self._exactly(_ABOUT.size))
        if size > _MOST_ABOUT:
            raise Closed("it tells more of its memory than there can be")
        about = self._exactly(size)
        self._take_memory(1)
        self._peer = self._told(lambda: self._agent.meet(about))

    def close(self) -> None:
        super().close()
        added, self._added, peer, self._peer = self._added, None, self._peer, ""
        try:
            if peer:
                self._agent.part(peer)
            if added is not None:
                self._agent.remove(added)
        except Exception as error:  # whatever it is: the connection is over
            logging.getLogger(__name__).debug("%s: %s", self._agent.name.decode(), error)

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def question(self) -> tuple[int, int, tuple[bytes, ...], bool]:
        kind, place, keys, is_computed = super().question()
        if kind != _READ:
            return kind, place, keys, is_computed
        if not 0 <= place < _PLACES or place in self._free:
            raise Closed("it has read what was not there")
        self._free.append(place)
        return STAY, 0, (), False

    def send_block(self, fetch: int, index: int, key: bytes, payload: bytes) -> None:
        place = self._free.pop()
        self._memory[place] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._socket.sendall(self._introduced(fetch, index, key, payload) + place.to_bytes(4, "little"))

    def answer(self, num_bytes: int, meanwhile: Callable[[], None]) -> tuple[int, int, int, bytes, bytearray]:
        del meanwhile  # a transfer takes a moment
        kind, fetch, index = self._answered()
        if kind == MISS:
            return kind, fetch, index, b"", bytearray()
        digest, place = self._exactly(DIGEST_BYTES), int.from_bytes(self._exactly(4), "little")
        if place >= _PLACES:
            raise Closed("it names a place that it does not have")
        self._told(lambda: self._agent.read(self._peer, self._there + place * num_bytes, self._memory[0]))
        payload = bytearray(self._memory[0].numpy())
        self.ask(_READ, place)
        return kind, fetch, index, digest, payload

    def _take_memory(self, places: int) -> None:
        self._memory = torch.zeros(places, self._num_bytes, dtype=torch.uint8)
        self._added = self._told(lambda: self._agent.add(self._memory))

    def _told(self, call: Callable[[], Any]) -> Any:
        """The agent's own errors end the connection."""
        try:
            return call()
        except Closed:
            raise
        except Exception as error:
            raise Closed(f"{self._agent.name.decode()}: {str(error) or type(error).__name__}") from error
