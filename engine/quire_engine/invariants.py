"""What a broken promise of the scheduling half looks like.

Promises: every check raises with one line that names the object and both values; nothing is repaired.
"""

from __future__ import annotations


class InvariantViolation(AssertionError):
    """The scheduler's state contradicts itself: a bug of ours, never the fault of a request."""


def require(holds: bool, text: str) -> None:
    """Raise InvariantViolation with `text` unless `holds` (unlike `assert`, also under `python -O`)."""
    if not holds:
        raise InvariantViolation(text)
