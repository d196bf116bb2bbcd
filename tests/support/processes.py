"""Looks at processes that may end while they are looked at.

Promises: one that has ended counts as none, also while it is a zombie whose exit code nobody has asked for; no look
raises because a process goes meanwhile. Must not know: who started them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil


def lives(pid: int) -> bool:
    """Whether this process runs or is stopped by a signal."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def program_words(process: psutil.Process) -> list[str]:
    """The words of a process's command line without their folders; none of one that has ended."""
    with suppress(psutil.NoSuchProcess):
        return [os.path.basename(word) for word in process.cmdline()]
    return []


def children_running(pid: int, program: str, *, recursive: bool = False) -> list[psutil.Process]:
    """The children of a process that live and run this module or script, the oldest first.

    `recursive`: also the children of its children, and theirs. A process that has ended has none.
    """
    found: list[tuple[float, psutil.Process]] = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=recursive):
            with suppress(psutil.NoSuchProcess):
                if program in program_words(child) and lives(child.pid):
                    found.append((child.create_time(), child))
    return [child for _, child in sorted(found, key=lambda pair: (pair[0], pair[1].pid))]


def inheriting(variable: str, value: str) -> list[int]:
    """The processes that live and were given this variable of the environment, which their children inherit."""
    wanted = f"{variable}={value}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with suppress(OSError):  # another user's, or gone; that of a zombie is empty
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
    return found
