"""The child process that checks a GPU's kernels and optional paths, and so may die of a fault of the device.

Promises: a forked one has the imports of its parent, which are most of what a launched one takes, and none of its
descriptors; it must be forked before anything touches the GPU, and from a process of one thread. Must not know: torch,
kernels.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

ENDING = 30.0  # seconds for a process that dies, which may write its memory to a file
_PIECE_BYTES = 1 << 16
_STDIN, _STDOUT, _STDERR = 0, 1, 2


class Stuck(Exception):
    """The process did not end in its time, and was killed."""


class ProverProcess:
    """A process that reads questions from a pipe until its end, and then ends by itself."""

    def __init__(self, pid: int, questions: int, replies: int) -> None:
        self.pid = pid
        self._questions, self._replies = os.fdopen(questions, "wb", 0), os.fdopen(replies, "rb", 0)
        self._code: int | None = None  # None: it has not ended

    @classmethod
    def launched(cls, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> ProverProcess:
        """Start a command. Raises OSError."""
        (asked, questions), (replies, said) = os.pipe(), os.pipe()
        try:
            moved = [(os.POSIX_SPAWN_DUP2, asked, _STDIN), (os.POSIX_SPAWN_DUP2, said, _STDOUT)]
            pid = os.posix_spawn(command[0], list(command), environment, file_actions=moved, setpgroup=0)
        except OSError:
            os.close(questions)
            os.close(replies)
            raise
        finally:
            os.close(asked)
            os.close(said)
        return cls(pid, questions, replies)

    @classmethod
    def forked(cls, main: Callable[[], int]) -> ProverProcess:
        """Fork this process into one that runs `main`, which talks on its stdin and stdout and returns an exit code.

        Raises OSError.
        """
        (asked, questions), (replies, said) = os.pipe(), os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(questions)
            os.close(replies)
            raise
        else:
            if not pid:
                _run(main, asked, said)
        finally:
            os.close(asked)
            os.close(said)
        return cls(pid, questions, replies)

    def ask(self, question: bytes, *, go_on: Callable[[], None], every: float, longest: float) -> tuple[bytes, int]:
        """Ask the only question: the reply, and the exit code of the process, which has ended then. Raises Stuck.

        `go_on` is called at once and then every so many seconds; after `longest` seconds the process is killed, as
        where `go_on` raises.
        """
        try:
            with suppress(BrokenPipeError):  # its exit code tells more
                self._questions.write(question)
            self._questions.close()
            end, reply = time.monotonic() + longest, b""
            while time.monotonic() < end:
                go_on()
                while select.select([self._replies], [], [], every)[0]:
                    data = self._replies.read(_PIECE_BYTES)
                    if not data:
                        return reply, self._ended(seconds=ENDING)
                    reply += data
            raise Stuck(f"its process did not end within {longest:g} seconds")
        finally:
            self.dismiss()

    def dismiss(self) -> None:
        """End the process, if it has not ended."""
        self._ended(seconds=0.0)  # killed first: it would take the end of its questions for something to read

    def _ended(self, *, seconds: float) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(end_child(self.pid, seconds=seconds))
            self._questions.close()
            self._replies.close()
        return self._code


def end_child(pid: int, *, seconds: float) -> int:
    """Wait for a child's end, which it has so many seconds for before it is killed: its status."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _run(main: Callable[[], int], asked: int, said: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(asked, _STDIN)
        os.dup2(said, _STDOUT)
        os.closerange(_STDERR + 1, os.sysconf("SC_OPEN_MAX"))
        sys.stdin = os.fdopen(_STDIN)  # without what the parent may have read ahead
        code = main()
    finally:
        sys.stderr.flush()
        os._exit(code)  # nothing of the parent's is closed or flushed twice
