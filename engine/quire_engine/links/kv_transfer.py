"""The transfer of KV blocks between engines over TCP: this engine lends its pool's blocks, and fetches those of others.

A block goes by the hash of its tokens and by the name of everything else that its bytes depend on, as in the files of
kept prefixes. Promises: what comes in is what the peer's pool held under that name; a transfer that fails is a miss.
Must not know: requests, the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

from quire_engine.contract.block_store import Payload, TransferCounts
from quire_engine.contract.config import KVTransferConfig
from quire_engine.execution.kv.pool_rows import PoolRows
from quire_engine.links.kv_fetching import Fetcher
from quire_engine.links.kv_lending import Lender, listen
from quire_engine.links.kv_link import KVLink
from quire_engine.links.link_security import LinkSecurity, link_security
from quire_engine.links.memory_agents import memory_agent
from quire_engine.links.memory_link import MemoryAgent, MemoryLink

_log = logging.getLogger(__name__)


class KVTransfer:
    """See `block_store.BlockPeers`."""

    def __init__(
        self,
        pool: PoolRows,
        listening: str,
        security: LinkSecurity,
        *,
        layout: Callable[[str], bytes],
        agent: MemoryAgent | None = None,
    ) -> None:
        """`pool`: on the host; `listening`: HOST:PORT; `layout`: the name of what the bytes depend on
        beside the tokens, from the model's digest; `agent`: blocks go through it. Raises ConfigError.
        """
        self._rows, self._layout = pool, layout
        where = listen(listening, security, "--kv-listen")
        host, port = where.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._way = b"" if agent is None else agent.name
        link = KVLink if agent is None else partial(MemoryLink, agent=agent, num_bytes=pool.num_bytes)
        self._lender = Lender(self._rows, where, security, link=link)
        self._fetcher = Fetcher(pool.num_bytes, security, link=link)
        self.offer, self.lose, self.clear = self._lender.offer, self._lender.lose, self._lender.clear
        self.fetch, self.cancel = self._fetcher.fetch, self._fetcher.cancel
        self.take, self.wait = self._fetcher.take, self._fetcher.wait
        self.block_seconds = self._fetcher.block_seconds

    @property
    def counts(self) -> TransferCounts:
        """Leases now, and what happened to blocks since the start."""
        lender, fetcher, size = self._lender, self._fetcher, self._rows.num_bytes
        return TransferCounts(
            leased=lender.num_leased,
            sent=lender.num_sent,
            received=fetcher.num_received,
            missed=fetcher.num_missed,
            refused=fetcher.num_refused,
            sent_bytes=lender.num_sent * size,
            received_bytes=fetcher.num_received * size,
        )

    def place(self, payload: Payload, block: int) -> None:
        """Copy a block that has come into the pool; call it between steps."""
        self._rows.place(payload, block)

    def name_model(self, digest: str) -> None:
        """Begin to pass blocks on, among engines of this model's digest."""
        name = sha256(self._layout(digest) + self._way).digest()
        if self._lender.layout != name:
            _log.info("KV blocks are passed on at %s", self.address)
        self._lender.layout = self._fetcher.layout = name

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._lender.close()
        self._fetcher.close()


def open_transfer(config: KVTransferConfig, pool: PoolRows, layout: Callable[[str], bytes]) -> KVTransfer:
    """The transfer that settings ask for. Raises ConfigError."""

    def path(text: str) -> Path | None:
        return Path(text) if text else None

    security = link_security(path(config.cert), path(config.key), path(config.ca))
    made = KVTransfer(pool, config.listen, security, layout=layout, agent=memory_agent(config))
    made.address = config.reached_at or made.address
    return made
