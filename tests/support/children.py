"""Runs child processes that may fail, crash or hang, with everything that they started ended by their limits.

Promises: a call returns within its limit and the seconds that a killed process takes to be gone; no process that the
child started outlives it, whatever session it began. Must not know: what runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from support.processes import inheriting, lives

_MARK = "CHILD_RUN"  # a variable that a child's own children inherit, by which they are found
_KILLED_SECONDS = 10.0  # a killed process that a driver holds is left behind after this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended. `code`: its exit code, minus the signal that killed it, or None if it ran past its limit."""

    code: int | None
    seconds: float


class Children:
    """Runs commands, in several threads at once if they call it, and can end all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[str] = set()
        self._closed = False

    def run(
        self, command: Sequence[str], *, seconds: float, cwd: Path, environment: Mapping[str, str], output: Path
    ) -> Ended:
        """Run a command whose stdout and stderr go to a file; it is killed after `seconds`."""
        mark, started = uuid.uuid4().hex, time.monotonic()
        with self._lock:
            if self._closed:
                return Ended(code=None, seconds=0.0)
            self._live.add(mark)
        try:
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env={**environment, _MARK: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            return Ended(code=code, seconds=time.monotonic() - started)
        finally:
            _kill_marked(mark, _KILLED_SECONDS)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_SECONDS)
            with self._lock:
                self._live.discard(mark)

    def end_all(self) -> None:
        """Kill every child that runs, and start no other one."""
        with self._lock:
            self._closed, live = True, set(self._live)
        for mark in live:
            _kill_marked(mark, 0.0)  # each run waits for its own


def _kill_marked(mark: str, seconds: float) -> None:
    """Kill the processes that carry a mark, and wait until none of them lives, or for these seconds."""
    deadline, killed = time.monotonic() + seconds, set()
    while found := {*inheriting(_MARK, mark), *(pid for pid in killed if lives(pid))}:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)  # what was forked meanwhile is found by the next look
