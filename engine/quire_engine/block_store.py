"""The store of KV blocks that outlive the process, as the scheduler uses it.

Two implementations: files (`execution.prefix_files`), and a fake in tests. Must not know: torch, requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


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
        """Of reading one; 0: unknown."""
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
        """These contents are wrong."""
        ...

    def clear(self) -> int:
        """Keep nothing; returns how many blocks were kept."""
        ...

    def read(self, keys: Iterable[bytes]) -> None:
        """Begin to read, in this order."""
        ...

    def take(self) -> list[tuple[bytes, bytes | None]]:
        """The contents that were read since the last call; None for one that could not be read."""
        ...

    def cancel(self) -> None:
        """Read nothing more, and drop what is not taken."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something has been read, at most so long."""
        ...

    def place(self, payload: bytes, block: int) -> None:
        """Copy what was read into a block of the pool."""
        ...
