"""Which prompts and answers begin alike, for a log that tells no token: each is compared with those before it.

Owns the token ids of what was compared lately, within the limits below. Promises: only numbers leave it, from which
equal beginnings can be told and nothing can be read; it says from when on its comparisons are complete. Must not know:
blocks, requests, steps.

Of all contents before it, one that has most tokens in common with a new one is named, and how many those are. This is
enough for every pair: with any third content the new one has in common what the named one has, but at most that many.
Contents are kept sorted as bytes, where those that have most in common with a new one are its neighbours.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from hashlib import blake2b
from secrets import token_bytes

MOST_BYTES = 32 << 20  # about eight million tokens
MOST_CONTENTS = 16384  # of which a list is shifted when one comes or goes
BYTES_PER_STEP, CONTENTS_PER_STEP = 8192, 4  # a short log is one that takes little memory
_ENTRY_BYTES = 210  # what the objects around one content take
_SALT_BYTES = 8
_TOKEN_BYTES = 4

Shared = tuple[int, int]  # (the content's number, how many of the first tokens)
NOTHING: Shared = (0, 0)


class Contents:
    """Contents by number, in the order in which they were told."""

    def __init__(self, max_bytes: int = MOST_BYTES, max_contents: int = MOST_CONTENTS) -> None:
        """With 0 bytes nothing is compared."""
        self.complete_from = 0  # those with lower numbers may be compared with no more
        self._max_bytes = max_bytes
        self._max_contents = max_contents
        self._key = token_bytes(16)  # nobody can try out salts against their names
        self._sorted: list[tuple[bytes, int]] = []
        self._of: dict[int, bytes] = {}  # by number, the oldest first
        self._num_bytes = 0

    @classmethod
    def beside(cls, num_steps: int) -> Contents:
        """For a log of this many steps; with none nothing is compared."""
        return cls(min(MOST_BYTES, BYTES_PER_STEP * num_steps), min(MOST_CONTENTS, CONTENTS_PER_STEP * num_steps))

    @property
    def compares(self) -> bool:
        return self._max_bytes > 0

    def name_of(self, salt: str) -> str:
        """Equal for equal salts; empty for none."""
        return self._root(salt).hex() if salt else ""

    def tell(self, number: int, salt: str, token_ids: Iterable[int]) -> Shared:
        """A content of its own; which one before it begins most alike."""
        return self._add(number, self._root(salt) + array("i", token_ids).tobytes())

    def extend(self, number: int, before: int, salt: str, token_ids: list[int], num_before: int) -> Shared:
        """One that goes on where content `before`, its first `num_before` tokens, ends; that one is needed no more."""
        known = self._of.get(before)
        if known is None or len(known) != _SALT_BYTES + num_before * _TOKEN_BYTES:
            return self.tell(number, salt, token_ids)
        shared = self._add(number, known + array("i", token_ids[num_before:]).tobytes())
        self._forget(before)
        return shared

    def _root(self, salt: str) -> bytes:
        """Contents with different salts have nothing in common, whatever their tokens."""
        return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_SALT_BYTES, key=self._key).digest()

    def _add(self, number: int, content: bytes) -> Shared:
        entry = content, number
        index = bisect_left(self._sorted, entry)
        shared = NOTHING
        for other, of in self._sorted[max(0, index - 1) : index + 1]:
            num_tokens = (_num_common(content, other) - _SALT_BYTES) // _TOKEN_BYTES
            if num_tokens > shared[1]:
                shared = of, num_tokens
        self._sorted.insert(index, entry)
        self._of[number] = content
        self._num_bytes += len(content) + _ENTRY_BYTES
        while self._num_bytes > self._max_bytes or len(self._of) > self._max_contents:
            oldest = next(iter(self._of))
            self._forget(oldest)
            self.complete_from = oldest + 1
        return shared

    def _forget(self, number: int) -> None:
        content = self._of.pop(number)
        del self._sorted[bisect_left(self._sorted, (content, number))]
        self._num_bytes -= len(content) + _ENTRY_BYTES


def _num_common(one: bytes, other: bytes) -> int:
    """Bytes that both begin with; slices are compared, which is much faster than bytes one by one."""
    low, high = 0, min(len(one), len(other)) + 1  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
