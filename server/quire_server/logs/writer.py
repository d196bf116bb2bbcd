"""Lines to a file descriptor, written by a thread, so that nobody who logs ever waits for who reads.

Owns the bounded queue. Promises: adding a line takes no time in proportion to anything; what found no room, or could
not be written, is counted, and told when lines flow again. Must not know: what lines say, the event loop.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

MOST_BYTES = 1 << 20  # that wait to be written
_AT_ONCE = 1 << 16  # what is written together; what a pipe holds


class LineWriter:
    """`put` from any thread; `close` once."""

    def __init__(self, descriptor: int, tell_lost: Callable[[int], bytes], *, most_bytes: int = MOST_BYTES) -> None:
        """`tell_lost`: the line that says that so many were lost."""
        self._descriptor = descriptor
        self._tell_lost = tell_lost
        self._most_bytes = most_bytes
        self._changed = Condition()  # guards all below; it is never held while something is written
        self._lines: deque[bytes] = deque()
        self._held = 0  # bytes of those lines and of what is being written
        self._lost = 0
        self._untold = 0  # of the lost
        self._closing = False
        # A daemon: a write that nobody ends must not keep the process from ending.
        self._thread = Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that were not written and never will be."""
        return self._lost

    def put(self, line: bytes) -> None:
        """Have a line written, with the newline that ends it; it is lost where too much waits."""
        with self._changed:
            if self._closing or self._held + len(line) > self._most_bytes:
                self._lose(1)
                return
            self._lines.append(line)
            self._held += len(line)
            self._changed.notify()

    def count_lost(self, num_lines: int) -> None:
        """Lines that could not even be made."""
        with self._changed:
            self._lose(num_lines)

    def close(self, seconds: float) -> bool:
        """Write what waits, for so long at most; whether all of it was. Lines that come later are lost."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _lose(self, num_lines: int) -> None:
        self._lost += num_lines
        self._untold += num_lines

    def _run(self) -> None:
        while batch := self._take():
            data = b"".join(batch)
            is_written = self._write(data)
            with self._changed:
                self._held -= len(data)
                if not is_written:
                    self._lose(len(batch))
                    continue
                untold, self._untold = self._untold, 0
            if untold and not self._write(self._tell_lost(untold)):
                with self._changed:
                    self._untold += untold

    def _take(self) -> list[bytes]:
        """The lines to be written next; none when all are written and no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closing)
            batch: list[bytes] = []
            size = 0
            while self._lines and size < _AT_ONCE:
                batch.append(self._lines.popleft())
                size += len(batch[-1])
            return batch

    def _write(self, data: bytes) -> bool:
        """False where the descriptor takes nothing now: the reader is gone, or the disk is full."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # shared with somebody who does not want to wait
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True
