"""What of a group's known tokens need not be computed when it enters.

Promises: a value; it holds until blocks are next taken or freed. Must not know: how it was found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold the first tokens of a prompt, in the order of their positions."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0  # in them, and in the tail or in `restored`
    tail: tuple[int, int] | None = None  # a block that begins as the next one does, with so many tokens: to be copied
    restored: tuple[int, ...] = ()  # host blocks with the tokens that follow; there is no tail then

    def without_tail(self, block_size: int) -> PrefixMatch:
        """Whole blocks alone."""
        return replace(self, num_tokens=len(self.blocks) * block_size, tail=None)


NO_MATCH = PrefixMatch()
