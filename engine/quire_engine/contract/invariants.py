"""The check by which the scheduler finds its own bugs.

Promises: a failed check raises with one line that names the object and both values; nothing is repaired.
"""

from __future__ import annotations

from collections.abc import Set

_MOST_NAMED = 8  # since a pool has many thousand blocks, and a message is one line


class InvariantViolation(AssertionError):
    """The scheduler's state contradicts itself: a bug of Quire, never caused by a request alone."""


def require(holds: bool, text: str) -> None:
    """Raise InvariantViolation with `text` unless `holds` (unlike `assert`, also under `python -O`)."""
    if not holds:
        raise InvariantViolation(text)


def require_same(found: Set[int], wanted: Set[int], text: str) -> None:
    """`require` that both sets are equal; the message has `text` and the first of what only one of them has."""
    if found != wanted:
        differ = sorted(found ^ wanted)
        raise InvariantViolation(f"{text}, {len(differ)} of them: {differ[:_MOST_NAMED]}")
