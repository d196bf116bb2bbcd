"""Where a body is while it arrives.

Promises: a large one has memory of its own, which the system has back as soon as the body is read; the heap would keep
it, since something small always lies behind it. Must not know: HTTP, what is in the body.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

OWN_BYTES = 256 << 10  # what is smaller is not worth a mapping

Bytes = bytes | mmap  # both can be searched, matched and cut


class BodyBuffer:
    """Takes the parts of a body of at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[bytes] = []
        self._memory: mmap | None = None
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        if self._memory is None:
            if self._num_bytes + len(part) <= OWN_BYTES:
                self._parts.append(part)
                self._num_bytes += len(part)
                return
            self._memory = _mapping(max(self._most, self._num_bytes + len(part)))
            self._memory.write(b"".join(self._parts))
            self._parts.clear()
        self._memory.write(part)
        self._num_bytes += len(part)

    def take(self) -> Bytes:
        """All of it; the buffer is empty then."""
        memory, parts = self._memory, self._parts
        self.clear()
        if memory is None:
            return b"".join(parts)
        size = memory.tell()
        if size == len(memory):
            return memory
        exact = _mapping(size)
        exact.write(memoryview(memory)[:size])
        return exact

    def clear(self) -> None:
        self._memory, self._parts, self._num_bytes = None, [], 0


def _mapping(num_bytes: int) -> mmap:
    return mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
