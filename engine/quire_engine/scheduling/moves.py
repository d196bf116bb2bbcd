"""The copies to the host and from it that a step makes before its first write.

Promises: a value. Must not know: why a block is moved.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moves:
    """(source block, target block) each; the fields of `Batch` with these names."""

    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    swap_keys: tuple[bytes, ...] = ()


NO_MOVES = Moves()
