"""How much there is of a value made of JSON: what is far too long is refused before it is copied or encoded.

Promises: looks at no more than it takes to know. Must not know: what the value is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_PER_VALUE = 8  # characters that a number, a key or a bracket may stand for


def exceeds(value: object, most: int) -> bool:
    """Whether the texts in `value`, with a few characters for every other part of it, are more than `most`."""
    left = most
    waiting: list[object] = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            left -= len(each)
        elif isinstance(each, Mapping):
            left -= _PER_VALUE * len(each)
            if left >= 0:
                waiting.extend(each.values())
                left -= sum(len(key) for key in each if isinstance(key, str))
        elif isinstance(each, Sequence):
            left -= _PER_VALUE * len(each)
            if left >= 0:
                waiting.extend(each)
        if left < 0:
            return True
    return False
