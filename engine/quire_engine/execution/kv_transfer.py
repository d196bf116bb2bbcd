"""The transfer of KV blocks between engines over TCP: this engine lends its pool's blocks, and fetches those of others.

A block goes by the hash of its tokens and by the name of everything else that its bytes depend on, as in the files of
kept prefixes. Promises: what comes in is what the peer's pool held under that name; a transfer that fails is a miss.
Must not know: requests, the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from torch import Tensor

from quire_engine.block_store import Payload, TransferCounts
from quire_engine.config import KVTransferConfig
from quire_engine.execution.kv_fetching import Fetcher
from quire_engine.execution.kv_lending import Lender, listen
from quire_engine.execution.kv_storage import block_rows, bytes_of
from quire_engine.link_security import LinkSecurity, link_security

_log = logging.getLogger(__name__)


class KVTransfer:
    """See `block_store.BlockPeers`."""

    def __init__(self, pool: Tensor, listening: str, security: LinkSecurity, *, layout: Callable[[str], bytes]) -> None:
        """`pool` [blocks, ...] on the host; `listening`: HOST:PORT; `layout`: the name of what the bytes depend on
        beside the tokens, from the model's digest. Raises ConfigError.
        """
        self._rows, self._layout = block_rows(pool), layout
        where = listen(listening, security, "--kv-listen")
        host, port = where.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._lender = Lender(self._rows, where, security)
        self._fetcher = Fetcher(self._rows.shape[1], security)
        self.offer, self.lose, self.clear = self._lender.offer, self._lender.lose, self._lender.clear
        self.fetch, self.cancel = self._fetcher.fetch, self._fetcher.cancel
        self.take, self.wait = self._fetcher.take, self._fetcher.wait

    @property
    def counts(self) -> TransferCounts:
        """Leases now, and what happened to blocks since the start."""
        lender, fetcher, size = self._lender, self._fetcher, self._rows.shape[1]
        return TransferCounts(
            leased=lender.num_leased,
            sent=lender.num_sent,
            received=fetcher.num_received,
            missed=fetcher.num_missed,
            refused=fetcher.num_refused,
            sent_bytes=lender.num_sent * size,
            received_bytes=fetcher.num_received * size,
        )

    @property
    def seconds_per_block(self) -> float:
        """Of reading one from the wire; 0: none was read yet."""
        return self._fetcher.seconds_per_block

    def place(self, payload: Payload, block: int) -> None:
        """Copy a block that has come into the pool; call it between steps."""
        bytes_of(self._rows[block])[:] = payload

    def name_model(self, digest: str) -> None:
        """From now on blocks are passed on, among engines of this model's digest."""
        name = sha256(self._layout(digest)).digest()
        if self._lender.layout != name:
            _log.info("KV blocks are passed on at %s", self.address)
        self._lender.layout = self._fetcher.layout = name

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._lender.close()
        self._fetcher.close()


def open_transfer(config: KVTransferConfig, pool: Tensor, layout: Callable[[str], bytes]) -> KVTransfer:
    """The transfer that settings ask for. Raises ConfigError."""

    def path(text: str) -> Path | None:
        return Path(text) if text else None

    security = link_security(
        key_file=path(config.key_file), cert=path(config.cert), key=path(config.key), ca=path(config.ca)
    )
    made = KVTransfer(pool, config.listen, security, layout=layout)
    made.address = config.reached_at or made.address
    return made
