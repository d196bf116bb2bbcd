"""What a sequence that lost its blocks still has computed, outside of them.

Promises: a value; the keys stay claimed until the sequence runs again or ends. Must not know: where the contents are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Swapped:
    """The first `num_tokens` tokens of a sequence, by the keys of the blocks that hold them, in order."""

    num_tokens: int
    keys: tuple[bytes, ...]
