"""The fake engine process as a fork of the test's own process: it is there in milliseconds, without imports.

A fork is a child like any other: it has a process id and a group of its own, the descriptors that it is handed and no
others, and is killed, stopped and reaped. Other programs are launched as ever.
Promises: what the child is, the supervisor cannot tell. Must not know: how an engine is restarted.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

MOST_DESCRIPTORS = 1 << 20


class Forked:
    """A child that runs a function with its descriptor; has what the supervisor uses of `subprocess.Popen`."""

    pids: ClassVar[list[int]] = []  # of all

    def __init__(self, body: Callable[[int], None], fd: int, stderr: int | None) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(body, fd, stderr)
        with suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(self.pid, self.pid)
        self.pids.append(self.pid)

    def poll(self) -> int | None:
        """The exit code, or the number of the signal that ended it as a negative one; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def launching(program: Sequence[str], body: Callable[[int], None]) -> SimpleNamespace:
    """What stands for the module `subprocess` where `program FD PARENT_PID` is to be a fork that runs `body(FD)`."""

    def launch(
        command: Sequence[str], *, stderr: int | None = None, **options: Any
    ) -> Forked | subprocess.Popen[bytes]:
        if tuple(command[:-2]) == tuple(program):
            return Forked(body, int(command[-2]), stderr)
        return subprocess.Popen(command, stderr=stderr, **options)

    return SimpleNamespace(Popen=launch, DEVNULL=subprocess.DEVNULL)


def _become(body: Callable[[int], None], fd: int, stderr: int | None) -> NoReturn:
    """Leave what the test's process had, as a program that is launched would, and end with the body."""
    code = 1
    try:
        os.setpgid(0, 0)
        faulthandler.disable()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if stderr is not None:
            os.dup2(stderr, 2)
        os.closerange(3, fd)
        os.closerange(fd + 1, MOST_DESCRIPTORS)
        gc.freeze()  # what is not its own is no garbage of its own
        body(fd)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)
