"""KV blocks through NIXL (UCX): the peer reads them from this process's memory, if it can without this one's help.

Questions, misses and digests go over the connection of `kv_link` all the same; of a block it carries the place in
memory from which the peer reads. NIXL itself neither authenticates nor encrypts. Promises: a place is written to again
only when the peer has read it or is gone. Must not know: requests, the scheduler.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from quire_engine.errors import ConfigError
from quire_engine.execution.kv_link import DIGEST_BYTES, MISS, STAY, STUCK_SECONDS, Closed, KVLink
from quire_engine.link_security import LinkSecurity

NAME = b"nixl"  # a part of the name of the layout: both sides have this transport, or none
_PLACES = 16  # blocks of one connection that the peer may still have to read
_MOST_ABOUT = 1 << 20  # bytes of what NIXL tells of a process
_READ = 6  # the question that tells that a place was read
_ABOUT = struct.Struct("<IQ")  # length of what NIXL tells of the process, address of the first place
_WAIT_SECONDS = 0.00005  # between two looks at a transfer
_numbers = count(1)


class NixlAgent:
    """This process's NIXL, used by all connections one at a time."""

    def __init__(self) -> None:
        """Raises ConfigError where NIXL is not installed, or does not start."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(f"kv_transport=nixl needs the extra quire[nixl]: {error}") from None
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._guard = threading.Lock()
        try:
            config = nixl_agent_config(backends=["UCX"])
            self._agent: Any = nixl_agent(f"quire-{os.getpid()}-{next(_numbers)}", config)
        except Exception as error:  # its errors have no common kind
            raise ConfigError(f"kv_transport=nixl cannot be used here: {error}") from None

    def about(self) -> bytes:
        """The bytes by which a peer can read from this process."""
        with self._guard:
            return bytes(self._agent.get_agent_metadata())

    def add(self, memory: Tensor) -> Any:
        """Let memory be read, and read into; the result is for `remove`."""
        with self._guard:
            return self._agent.register_memory(memory)

    def remove(self, added: Any) -> None:
        with self._guard:
            self._agent.deregister_memory(added)

    def meet(self, about: bytes) -> str:
        """The name of a peer."""
        with self._guard:
            name = self._agent.add_remote_agent(about)
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, peer: str) -> None:
        with self._guard:
            self._agent.remove_remote_agent(peer)

    def read(self, peer: str, source: int, target: Tensor) -> None:
        """Fill `target` from an address of the peer. Raises Closed."""
        size = target.nbytes
        with self._guard:
            here = self._agent.get_xfer_descs([(target.data_ptr(), size, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(source, size, 0)], "DRAM")
            handle = self._agent.initialize_xfer("READ", here, there, peer)
            state = self._agent.transfer(handle)
        deadline = time.monotonic() + STUCK_SECONDS
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(_WAIT_SECONDS)
            with self._guard:
                state = self._agent.check_xfer_state(handle)
        with self._guard:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise Closed("its memory cannot be read any more")


class NixlLink(KVLink):
    """See `KVLink`: a connection whose blocks NIXL carries."""

    _questions = KVLink._questions | {_READ}

    def __init__(self, connection: socket.socket, agent: NixlAgent, num_bytes: int) -> None:
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
            raise Closed("it tells more of its memory than NIXL does")
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
            logging.getLogger(__name__).debug("NIXL: %s", error)

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
        """NIXL's own errors end the connection."""
        try:
            return call()
        except Closed:
            raise
        except Exception as error:
            raise Closed(f"NIXL: {str(error) or type(error).__name__}") from error
