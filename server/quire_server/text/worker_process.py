"""The parent's side of a worker process: starts it, asks it questions, replaces it when it died or was stopped.

Promises: every question gets an answer or ProcessDied within the process's own limits, which the kernel enforces, and
within a timeout of the parent if the process is stopped. Must not know: HTTP.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from os import getpid
from pathlib import Path

from quire_engine.machine import is_stopped
from quire_engine.own_pauses import OwnPauses

_SLACK_SECONDS = 0.75  # in addition to the time limit, for the wait for a core
_START_SECONDS = 30.0  # in addition to it, for the interpreter and its imports on a busy machine
_LOOK_SECONDS = 0.25  # of silence, after which the parent checks whether the process is stopped
_PIECE_BYTES = 1 << 16
# Signals of an operator or of a system without memory; a process that exceeds its own limits ends by others.
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP})


class ProcessDied(Exception):
    """The process ended before it answered: it exceeded one of its limits, or was killed."""

    def __init__(self, signal: int | None = None) -> None:
        super().__init__()
        self.signal = signal  # the signal that ended it, if any; None also for one that the parent has killed


class _Stopped(Exception):
    """The process is stopped by a signal or a debugger: its own limits do not run either."""


class WorkerProcess:
    """Started by the first question, and again after it died. For one thread at a time.

    The script gets its limits as arguments, its setup in the first line, and then one question per line.
    """

    def __init__(self, script: Path, setup: Mapping[str, object], *, time_limit: float, memory_bytes: int) -> None:
        self._script = script
        self._setup = json.dumps(setup)
        self._limits = [str(time_limit), str(memory_bytes)]
        self._time_limit = time_limit
        self.before_asking: Callable[[int], None] | None = None  # for tests; gets the process id
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = getpid()
        self._is_killed = False  # by `kill`, while it was asked

    def start(self) -> dict[str, object]:
        """Start the process; returns its answer to the setup, with `error` after a failure.

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
        """The answer to one line of JSON, with `error` after a failure, also of the start. Raises ProcessDied.

        A process that is stopped, or killed from outside, is replaced, and the new one is asked.
        """
        self._is_killed = False
        for may_try_again in (True, False):
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
            except ProcessDied as died:
                if self._is_killed:
                    raise ProcessDied from None
                if died.signal not in FROM_OUTSIDE or not may_try_again:
                    raise
        raise ProcessDied(signal.SIGSTOP)

    def kill(self) -> None:
        """May be called from other threads: the thread that asks gets ProcessDied."""
        process, self._is_killed = self._process, True
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """Kill the process, if it runs, and wait for its end."""
        process, self._process = self._process, None
        # A fork has a copy of this object, but the process is the parent's: waiting for it would never end.
        if process is not None and getpid() == self._owner:
            process.kill()
            process.communicate()

    def _exchange(self, process: subprocess.Popen[bytes], line: str, seconds: float) -> dict[str, object]:
        """Ask, and kill a process that does not answer in time or is stopped. Raises ProcessDied, _Stopped."""
        try:
            answer = _converse(process, line.encode() + b"\n", seconds)
        except _Stopped:
            self.stop()
            raise
        except TimeoutError:
            self.stop()
            raise ProcessDied from None
        if not answer.endswith(b"\n"):
            self.stop()  # a process that has ended by itself keeps its signal
            raise ProcessDied(-process.returncode if process.returncode < 0 else None)
        reply: dict[str, object] = json.loads(answer)
        return reply


def _converse(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """The answer to a line, up to its line break; less if the process ends. Raises TimeoutError, _Stopped.

    Pipes are non-blocking: a stopped process does not read, and a line may be longer than a pipe's buffer.
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
    asked, pauses = time.monotonic(), OwnPauses(_LOOK_SECONDS)
    while not answer.endswith(b"\n"):
        left = seconds - pauses.silence(asked)
        if left <= 0:
            raise TimeoutError
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
