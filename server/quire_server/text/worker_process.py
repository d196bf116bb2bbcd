"""The parent's side of one worker process: starts it, asks it, and replaces it when it died.

Promises: an answer or ProcessDied for every question, within the process's own limits, which the kernel enforces.
Must not know: what the process does, HTTP.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from os import getpid
from pathlib import Path


class ProcessDied(Exception):
    """The process ended before it answered: it broke one of its limits, or something killed it."""

    def __init__(self, signal: int | None = None) -> None:
        super().__init__()
        self.signal = signal  # that ended it, where one did


class WorkerProcess:
    """Started when first asked, and again after it died. For one thread at a time.

    The script gets its limits as arguments, what it is for in its first line, and then one question a line.
    """

    def __init__(self, script: Path, setup: Mapping[str, object], *, time_limit: float, memory_bytes: int) -> None:
        self._script = script
        self._setup = json.dumps(setup)
        self._limits = [str(time_limit), str(memory_bytes)]
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = getpid()

    def start(self) -> dict[str, object]:
        """Starts the process; its answer to what it is for, which tells what went wrong as `error`.

        Raises ProcessDied.
        """
        self.stop()
        self._process = subprocess.Popen(
            # -P: the script's folder must not shadow top-level modules of the process
            [sys.executable, "-P", str(self._script), *self._limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback could show a message's text
            start_new_session=True,  # a Ctrl-C is for the server, which still answers while it drains
        )
        return self._exchange(self._process, self._setup)

    def ask(self, line: str) -> dict[str, object]:
        """The answer to one line of JSON; `error` where the process has one, or could not start. Raises ProcessDied."""
        if self._process is None or self._process.poll() is not None:
            answer = self.start()
            if "error" in answer:
                self.stop()
                return answer
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
            self.stop()  # no more than waits for one that has ended by itself, whose signal stays the first
            raise ProcessDied(-process.returncode if process.returncode < 0 else None)
        reply: dict[str, object] = json.loads(answer)
        return reply
