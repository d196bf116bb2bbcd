"""The parent's side of one worker process: starts it, asks it, and replaces it when it died or stands still.

Promises: an answer or ProcessDied for every question, within the process's own limits, which the kernel enforces, and
within a time of ours where the process is stopped and they cannot. Must not know: HTTP.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from os import getpid
from pathlib import Path

from quire_engine.machine import is_stopped

_SLACK_SECONDS = 0.75  # beyond its time limit, for a process that has to wait for a core before it can begin
_START_SECONDS = 30.0  # beyond it, for an interpreter and its imports on a busy machine
_LOOK_SECONDS = 0.25  # without a word, after which it is looked at whether the process is stopped
_PIECE_BYTES = 1 << 16


class ProcessDied(Exception):
    """The process ended before it answered: it broke one of its limits, or something killed it."""

    def __init__(self, signal: int | None = None) -> None:
        super().__init__()
        self.signal = signal  # that ended it, where one did


class _Stopped(Exception):
    """Something holds the process: its own limits do not run either, and it is not to blame."""


class WorkerProcess:
    """Started when first asked, and again after it died. For one thread at a time.

    The script gets its limits as arguments, what it is for in its first line, and then one question a line.
    """

    def __init__(self, script: Path, setup: Mapping[str, object], *, time_limit: float, memory_bytes: int) -> None:
        self._script = script
        self._setup = json.dumps(setup)
        self._limits = [str(time_limit), str(memory_bytes)]
        self._time_limit = time_limit
        self.before_asking: Callable[[int], None] | None = None  # for tests; gets the process id
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
        try:
            return self._exchange(self._process, self._setup, self._time_limit + _START_SECONDS)
        except _Stopped:
            raise ProcessDied from None

    def ask(self, line: str) -> dict[str, object]:
        """The answer to one line of JSON; `error` where the process has one, or could not start. Raises ProcessDied.

        A process that was stopped is replaced, and the new one asked.
        """
        for _ in range(2):
            if self._process is None or self._process.poll() is not None:
                answer = self.start()
                if "error" in answer:
                    self.stop()
                    return answer
            if self._process is None:
                break
            if self.before_asking is not None:
                self.before_asking(self._process.pid)
            try:
                return self._exchange(self._process, line, self._time_limit + _SLACK_SECONDS)
            except _Stopped:
                continue
        raise ProcessDied

    def kill(self) -> None:
        """For other threads than the one that asks: that one is told that the process died."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """Kills the process, if it runs, and waits for its end."""
        process, self._process = self._process, None
        # A fork of ours ends with a copy of this object; the process is its parent's, and it would wait for ever.
        if process is not None and getpid() == self._owner:
            process.kill()
            process.communicate()

    def _exchange(self, process: subprocess.Popen[bytes], line: str, seconds: float) -> dict[str, object]:
        """Kills a process that has not answered in time, or that is stopped. Raises ProcessDied, _Stopped."""
        try:
            answer = _converse(process, line.encode() + b"\n", time.monotonic() + seconds)
        except _Stopped:
            self.stop()
            raise
        if not answer.endswith(b"\n"):
            self.stop()  # no more than waits for one that has ended by itself, whose signal stays the first
            raise ProcessDied(-process.returncode if process.returncode < 0 else None)
        reply: dict[str, object] = json.loads(answer)
        return reply


def _converse(process: subprocess.Popen[bytes], line: bytes, deadline: float) -> bytes:
    """What a process says to a line, up to the end of its own; less where it ends or the time does. Raises _Stopped.

    Neither end of a pipe may block: whoever is stopped takes nothing either, and a line may be longer than a pipe.
    """
    answer = bytearray()
    if process.stdin is None or process.stdout is None:
        return b""
    to, back = process.stdin.fileno(), process.stdout.fileno()
    poll = select.poll()
    for end, event in ((to, select.POLLOUT), (back, select.POLLIN)):
        os.set_blocking(end, False)
        poll.register(end, event)
    unsent = memoryview(line)
    while not answer.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        ready = {end for end, _ in poll.poll(1000 * min(left, _LOOK_SECONDS))}
        if not ready and is_stopped(process.pid):
            raise _Stopped
        if back in ready:
            piece = os.read(back, _PIECE_BYTES)
            if not piece:
                break
            answer += piece
        elif to in ready:
            try:
                unsent = unsent[os.write(to, unsent[:_PIECE_BYTES]) :]
            except BrokenPipeError:
                break
            if not unsent:
                poll.unregister(to)
    return bytes(answer)
