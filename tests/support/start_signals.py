"""Signals at chosen moments of a server's start, which are told by what its processes have loaded and said so far.

Promises: no moment is a guess at seconds; every process is ended. Must not know: who asks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

PATIENCE = 300.0  # seconds until a moment has come, and until a start has ended: only a hang takes as long


@dataclass(frozen=True, slots=True)
class Start:
    """A start under way."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    def has_loaded(self, library: str) -> bool:
        return _maps(self.process.pid, library)

    def children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


def _maps(pid: int, library: str) -> bool:
    with contextlib.suppress(OSError):
        return library in Path(f"/proc/{pid}/maps").read_text()
    return False


def _takes(pid: int, field: str, number: signal.Signals) -> bool:
    """Whether a process catches (SigCgt) or ignores (SigIgn) a signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


# Before the first, Python itself starts. Each is true from its moment on.
_MOMENTS: dict[str, Callable[[Start], bool]] = {
    "its first line": lambda start: _takes(start.process.pid, "SigCgt", signal.SIGTERM),
    "settings": lambda start: start.has_loaded("pydantic_core"),
    "event loop": lambda start: start.has_loaded("uvloop"),
    "engine launched": lambda start: bool(start.children()),
    "engine's first line": lambda start: any(_takes(c.pid, "SigIgn", signal.SIGTERM) for c in start.children()),
    "port": lambda start: start.said("listening on"),
    "torch": lambda start: any(_maps(child.pid, "libtorch") for child in start.children()),
    "tokenizer": lambda start: start.has_loaded("tokenizers"),
    "weights": lambda start: any(_maps(child.pid, "memfd:") for child in start.children()),
    "application": lambda start: start.said("Application startup"),
    "ready": lambda start: start.said("try: curl"),
    "spare engine": lambda start: sum("quire_engine.process" in _command(child) for child in start.children()) > 1,
}
MOMENTS = tuple(_MOMENTS)


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _end_of(start: Start) -> int:
    """The exit code. AssertionError with what is known of a process that does not end."""
    try:
        return start.process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        pid = start.process.pid
        waits = [f"{task.name}: {(task / 'wchan').read_text()}" for task in Path(f"/proc/{pid}/task").iterdir()]
        children = [" ".join(_command(child)) for child in start.children()]
        known = f"threads {waits}, children {children}, it said: {start.log.read_text()}"
        raise AssertionError(f"not ended {PATIENCE:g} s after the signal: {known}") from None


def signal_at(moment: str, number: signal.Signals) -> str:
    """Start a server and send a signal at the moment; its exit code and last line.

    A SIGINT goes to the process group, as a terminal's Ctrl-C does. AssertionError for a traceback, for more than one
    line about the end of a start, and for a process that is left.
    """
    with tempfile.NamedTemporaryFile(mode="w+", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire_server.cli", "serve", "--host", "127.0.0.1", "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        start = Start(process, Path(log.name))
        children: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + PATIENCE
            while not _MOMENTS[moment](start):
                assert process.poll() is None, start.log.read_text()
                assert time.monotonic() < deadline, f"no {moment!r}: {start.log.read_text()}"
            children = start.children()
            (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
            code = _end_of(start)
            said = start.log.read_text()
            assert "Traceback" not in said, said
            assert said.count(f"ended by {number.name}") + said.count(f"received {number.name}") == 1, said
            _, alive = psutil.wait_procs(children, timeout=PATIENCE)
            assert not alive, alive
            return f"{code} {said.splitlines()[-1]}"
        finally:
            for each in (process, *children):
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    each.kill()
            process.wait()
