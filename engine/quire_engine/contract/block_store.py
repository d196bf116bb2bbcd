"""Sources of KV blocks that this process has not computed, as the scheduler uses them: a store, or other engines.

Stores are files (`execution.prefix_files`), other engines are reached by `execution.kv_transfer`; tests have fakes of
both. Must not know: torch, requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

Payload = bytes | bytearray  # of a block
MOST_FETCHED = 8192  # blocks that one fetch brings at most


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """The number of blocks in a store, and its events since the start."""

    blocks: int = 0  # kept now
    written: int = 0
    read: int = 0
    dropped: int = 0  # not written: too many waited, the pool needed the place, or no older block could go
    refused: int = 0  # damaged or foreign


class BlockStore(Protocol):
    """Keeps contents of blocks beside the process; one of its users is the engine process that writes to the pool.

    No method waits but `wait`.
    """

    @property
    def counts(self) -> StoreCounts: ...
    @property
    def seconds_per_block(self) -> float:
        """The seconds that reading one block takes; 0: unknown."""
        ...

    def holds(self, key: bytes) -> bool: ...
    def use(self, keys: Sequence[bytes]) -> None:
        """A request begins with these blocks, from its first one on."""
        ...

    def offer(self, key: bytes, block: int, depth: int) -> None:
        """Keep this block of the pool. Its content stays until `lose`. `depth`: blocks before it."""
        ...

    def lose(self, key: bytes) -> None:
        """The pool is about to write over this content."""
        ...

    def remove(self, keys: Iterable[bytes]) -> None:
        """Forget contents that are wrong."""
        ...

    def clear(self) -> int:
        """Keep nothing; returns how many blocks were kept."""
        ...

    def read(self, keys: Iterable[bytes]) -> None:
        """Begin to read, in this order."""
        ...

    def take(self) -> Sequence[tuple[bytes, Payload | None]]:
        """The contents that were read since the last call; None for one that could not be read."""
        ...

    def cancel(self) -> None:
        """Read nothing more, and drop what is not taken."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until something has been read, at most `seconds`."""
        ...

    def place(self, payload: Payload, block: int) -> None:
        """Copy what was read into a block of the pool."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    """Blocks that are leased to other engines now, and the events since the start."""

    leased: int = 0  # asked for by others, and not sent yet
    sent: int = 0
    received: int = 0
    missed: int = 0  # asked for, and not received while the request waited
    refused: int = 0  # received with a digest that is not theirs
    sent_bytes: int = 0
    received_bytes: int = 0


class BlockPeers(Protocol):
    """Lends the pool's blocks to other engines, and fetches theirs. No method waits but `wait`."""

    @property
    def counts(self) -> TransferCounts: ...
    def block_seconds(self, peer: str) -> float:
        """Return the seconds that one block from the engine at `peer` takes while blocks flow; 0: unknown."""
        ...

    def offer(self, key: bytes, block: int) -> None:
        """Let others have this content, which this block of the pool holds until `lose`."""
        ...

    def lose(self, key: bytes) -> None:
        """The pool is about to write over this content. What others wait for is copied, as far as there is room."""
        ...

    def clear(self) -> None:
        """Nothing that was offered so far may be lent any more."""
        ...

    def fetch(self, name: str, peer: str, keys: Sequence[bytes], *, is_computed: bool) -> None:
        """Begin to fetch these contents from the engine at `peer`, in this order, under a name of the caller's.

        At most MOST_FETCHED of them; after `cancel` the name is free again.

        `is_computed`: the peer is computing them, so one that is not there will come.
        """
        ...

    def take(self) -> Sequence[tuple[bytes, Payload | None]]:
        """The contents that have come since the last call; None for one that will not come."""
        ...

    def cancel(self, name: str) -> None:
        """Nothing of this fetch is wanted any more."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until something has come, at most `seconds`."""
        ...

    def place(self, payload: Payload, block: int) -> None:
        """Copy what has come into a block of the pool."""
        ...

    def name_model(self, digest: str) -> None:
        """The model's name on all machines; until it is known nothing is lent, and nothing fetched."""
        ...
