"""How much of a long prompt one step computes.

Promises: never more than asked for.
Must not know: the step's budget beyond what it is given, other groups.
"""

from __future__ import annotations

from typing import Protocol


class ChunkPolicy(Protocol):
    """Sizes the slices of unfinished prompts, the elder's first claim excepted."""

    def size(self, *, pending: int, planned: int, budget: int) -> int:
        """Tokens to add to the `planned` ones of this step, at most min(pending, budget); 0 is none."""
        ...


class FixedChunk:
    """At most `prefill_chunk` tokens of one sequence in one step."""

    def __init__(self, prefill_chunk: int) -> None:
        self._cap = prefill_chunk

    def size(self, *, pending: int, planned: int, budget: int) -> int:
        return min(pending, self._cap - planned, budget)
