"""What child processes write to their stderr, passed on among the server's own lines.

Owns the pipe. Promises: a child that writes never waits for who reads the server's log. Must not know: which children
there are, what they say.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread

_AT_ONCE = 1 << 16


class Relay:
    """`descriptor` is for children; `close` once, when they have ended."""

    def __init__(self, pass_on: Callable[[str], None]) -> None:
        """`pass_on` gets whole lines, several that came together at once, without the last one's end."""
        self._pass_on = pass_on
        self._source, self.descriptor = os.pipe()
        self._thread = Thread(target=self._run, name="children's stderr", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Pass on what is still there; a child that lives on does not keep us longer than that."""
        os.close(self.descriptor)
        self._thread.join(seconds)

    def _run(self) -> None:
        rest = b""
        while data := os.read(self._source, _AT_ONCE):
            whole, end, rest = (rest + data).rpartition(b"\n")
            if end:
                self._pass_on(whole.decode("utf-8", "replace"))
            if len(rest) >= _AT_ONCE:  # no line at all
                self._pass_on(rest.decode("utf-8", "replace"))
                rest = b""
        if rest:
            self._pass_on(rest.decode("utf-8", "replace"))
        os.close(self._source)
