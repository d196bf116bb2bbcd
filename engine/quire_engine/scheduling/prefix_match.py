"""What of a group's known tokens need not be computed when it enters.

Promises: a value; it holds until blocks are next taken or freed. Must not know: how it was found.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold the first tokens of a prompt, in the order of their positions."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0  # in them


NO_MATCH = PrefixMatch()
