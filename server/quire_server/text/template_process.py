"""The parent's side of one chat-template process: starts it, asks it, and replaces it when it died.

Promises: an answer or ProcessDied for every question, within the process's own time limit.
Must not know: messages, tokenizers, HTTP.
"""

from __future__ import annotations

import json
import subprocess
import sys
from os import getpid
from pathlib import Path

_SCRIPT = Path(__file__).with_name("template_worker.py")
_MEMORY_BYTES = 512 * 2**20


class ProcessDied(Exception):
    """The process ended before it answered: it ran out of time, or something killed it."""


class TemplateProcess:
    """Started when first asked, and again after it died. For one thread at a time."""

    def __init__(self, source: str, time_limit: float) -> None:
        self._source = source
        self._time_limit = time_limit
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = getpid()

    def start(self) -> dict[str, object]:
        """Starts the process and gives it the template; `variables` and `words`, or `error` and `message`.

        Raises ProcessDied.
        """
        self.stop()
        self._process = subprocess.Popen(
            # -P: this folder's modules must not shadow top-level ones of the process
            [sys.executable, "-P", str(_SCRIPT), str(self._time_limit), str(_MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback could show a message's text
            start_new_session=True,  # a Ctrl-C is for the server, which still renders while it drains
        )
        return self._exchange(self._process, json.dumps({"source": self._source}))

    def ask(self, line: str) -> dict[str, object]:
        """One render, as one line of JSON: `text`, or `error` and perhaps `message`. Raises ProcessDied."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        if self._process is None:
            raise ProcessDied
        return self._exchange(self._process, line)

    def stop(self) -> None:
        """Kills the process, if it runs, and waits for its end."""
        process, self._process = self._process, None
        # A fork of ours ends with a copy of this object; the process is its parent's, and it would wait for ever.
        if process is not None and getpid() == self._owner:
            process.kill()
            process.communicate()

    def _exchange(self, process: subprocess.Popen[bytes], line: str) -> dict[str, object]:
        """Blocks without a timer of its own: the process is killed by the kernel when its time is over."""
        answer = b""
        if process.stdin is not None and process.stdout is not None:
            try:
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
        if not answer.endswith(b"\n"):
            self.stop()
            raise ProcessDied
        reply: dict[str, object] = json.loads(answer)
        return reply
