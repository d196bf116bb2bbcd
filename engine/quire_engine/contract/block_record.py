"""The record of what the blocks of a KV pool hold, as the scheduler uses it: in memory that outlives the process.

`execution.surviving_pool` has the memory; tests have a fake. Must not know: torch, requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock:
    """One block: a full one with its content, or one that is not full with its first tokens."""

    block: int
    content: bytes  # its hash; of a block with `tokens` the hash of all blocks before it
    scope: str  # that it belongs to, `GenerationRequest.cache_scope`
    group: int = 0  # of layers
    tokens: tuple[int, ...] = ()  # of a block that is not full: those that it has keys and values of


class BlockRecord(Protocol):
    """Tells the truth at every moment, also in the middle of a call: the process may be killed in it.

    The caller writes only what a step has computed whose result was applied, and calls `lose` before a block is
    written to.
    """

    def found(self) -> Iterable[HeldBlock]:
        """The blocks that the engine process before this one has left."""
        ...

    def fill(self, block: int, content: bytes, group: int, scope: str) -> None:
        """The block is full and has this content, until `lose`."""
        ...

    def begin(self, block: int, parent: bytes, tokens: Sequence[int], scope: str) -> None:
        """The block begins with these tokens, fewer than it has room for, behind the blocks that `parent` names."""
        ...

    def lose(self, block: int) -> None:
        """The block may be written to."""
        ...
