"""Libraries by which a process reads the memory of others: NIXL, and Mooncake's transfer engine.

Neither authenticates nor encrypts. Promises: a library is loaded where a setting asks for it; one that is missing or
does not start is a wrong setting. Must not know: requests, the scheduler.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from itertools import count
from typing import Any

from torch import Tensor

from quire_engine.contract.config import KVTransferConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.links.kv_link import STUCK_SECONDS, Closed
from quire_engine.links.memory_link import MemoryAgent

_WAIT_SECONDS = 0.00005  # between two looks at a transfer
_numbers = count(1)


def memory_agent(config: KVTransferConfig) -> MemoryAgent | None:
    """The library that settings ask for; None: blocks go over the connection itself. Raises ConfigError."""
    if config.transport == "mooncake":
        host = (config.reached_at or config.listen).rpartition(":")[0]
        return MooncakeAgent(host.strip("[]"))
    return NixlAgent() if config.transport == "nixl" else None


class NixlAgent:
    """See `MemoryAgent`: this process's NIXL (UCX), used by all connections one at a time."""

    name = b"nixl"

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
        with self._guard:
            return bytes(self._agent.get_agent_metadata())

    def add(self, memory: Tensor) -> Any:
        with self._guard:
            return self._agent.register_memory(memory)

    def remove(self, added: Any) -> None:
        with self._guard:
            self._agent.deregister_memory(added)

    def meet(self, about: bytes) -> str:
        with self._guard:
            name = self._agent.add_remote_agent(about)
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, peer: str) -> None:
        with self._guard:
            self._agent.remove_remote_agent(peer)

    def read(self, peer: str, source: int, target: Tensor) -> None:
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


class MooncakeAgent:
    """See `MemoryAgent`: Mooncake's transfer engine over TCP, in this process.

    It listens on two ports of its own, on all of the machine's addresses. A peer may read and write the added memory,
    and no other; the digest of a block shows whether it was written to.
    """

    name = b"mooncake"

    def __init__(self, host: str) -> None:
        """`host`: where peers reach this process. Raises ConfigError where it is not installed, or does not start."""
        try:
            from mooncake.engine import TransferEngine  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(
                f"kv_transport=mooncake needs the extra quire[mooncake], and libibverbs1 of the system: {error}"
            ) from None
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise ConfigError(f"kv_transport=mooncake cannot be used here: it does not start on {host}; see above")
        self._about = f"{host}:{self._engine.get_rpc_port()}".encode()

    def about(self) -> bytes:
        return self._about

    def add(self, memory: Tensor) -> Any:
        if self._engine.register_memory(memory.data_ptr(), memory.nbytes):
            raise RuntimeError("no memory can be added")
        return memory.data_ptr()

    def remove(self, added: Any) -> None:
        self._engine.unregister_memory(added)

    def meet(self, about: bytes) -> str:
        return about.decode()

    def part(self, peer: str) -> None:
        """Do nothing: this agent keeps nothing of a peer."""

    def read(self, peer: str, source: int, target: Tensor) -> None:
        if self._engine.transfer_sync_read(peer, target.data_ptr(), source, target.nbytes):
            raise Closed("its memory cannot be read any more")
