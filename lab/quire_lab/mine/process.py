"""The judge's end of a student's process: calls with a time limit, and an end for whatever does not answer.

Promises: the process has its own session, limits of memory and processor time, an empty environment and a folder of its
own; it is gone at the end with all that it started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CALL_SECONDS = 5.0  # for one call; the first one also imports the file
FIRST_SECONDS = 30.0
ALL_SECONDS = 240  # of processor time
MEMORY_BYTES = 2 << 30
MOST_REPLY_BYTES = 8 << 20
_HOST = Path(__file__).with_name("host.py")


class StudentError(Exception):
    """The student's code raised, took too long, ended, or answered what is no answer. One line."""


class StudentProcess:
    """`with StudentProcess(path) as student: pool = student.make("BlockPool", 16)`."""

    def __init__(self, path: Path, *, call_seconds: float = CALL_SECONDS) -> None:
        self._path = path.resolve()
        self._call_seconds = call_seconds
        self._asked = self._made = 0
        self._buffer = b""
        self.seconds = 0.0  # in calls, all together

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # removed in __exit__
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(_HOST), str(self._path), str(ALL_SECONDS), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._folder.name,
            env={"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._folder.cleanup()

    def classes(self) -> list[str]:
        """Return which of `BlockPool`, `PageTable` and `Scheduler` the file defines. Raises StudentError."""
        return [str(name) for name in self._ask(do="classes")]

    def make(self, name: str, *args: object, **kwargs: object) -> Student:
        """An object of the student's class. Raises StudentError."""
        self._made += 1
        self._ask(do="make", of=self._made, name=name, args=args, kwargs=kwargs)
        return Student(self, self._made, name)

    def fit(self, name: str, *offers: Offer) -> Student:
        """An object of the student's class, from the offers that its parameters ask for. Raises StudentError."""
        self._made += 1
        self._ask(do="fit", of=self._made, name=name, offers=[offer.plain() for offer in offers])
        return Student(self, self._made, name)

    def names(self, of: int) -> dict[str, bool]:
        """Whether each public attribute of an object is a method, by its name."""
        found: dict[str, bool] = self._ask(do="names", of=of)
        return found

    def extend(self, of: int, name: str, values: tuple[int, ...]) -> None:
        """Extend a list that is an attribute of an object."""
        self._ask(do="extend", of=of, name=name, values=values)

    def call(self, of: int, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Call a method of an object."""
        return self._ask(do="call", of=of, name=name, args=args, kwargs=kwargs)

    def read(self, of: int, name: str) -> Any:
        """An attribute of an object, or what the method of this name returns."""
        return self._ask(do="read", of=of, name=name)

    def _ask(self, **call: object) -> Any:
        began = time.perf_counter()
        limit = self._call_seconds if self._asked else max(FIRST_SECONDS, self._call_seconds)
        self._asked += 1
        try:
            if self._child.stdin is None:
                raise StudentError("its process has no pipe")
            self._child.stdin.write(json.dumps(call).encode() + b"\n")
            self._child.stdin.flush()
            reply = json.loads(self._line(began + limit, limit, str(call.get("name", call["do"]))))
        except (BrokenPipeError, ConnectionResetError):
            raise StudentError(f"its process has ended {self._how()}") from None
        except ValueError:
            raise StudentError("its answer cannot be read") from None
        finally:
            self.seconds += time.perf_counter() - began
        if "raised" in reply:
            raise StudentError(f"{call.get('name', 'the file')} raised {reply['raised']}")
        return reply["value"]

    def _line(self, deadline: float, limit: float, name: str) -> bytes:
        if self._child.stdout is None:
            raise StudentError("its process has no pipe")
        fd = self._child.stdout.fileno()
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.perf_counter()))
            if not readable:
                raise StudentError(f"{name} has not answered within {limit:g} s")
            part = os.read(fd, 1 << 16)
            if not part:
                raise StudentError(f"its process has ended {self._how()}")
            self._buffer += part
            if len(self._buffer) > MOST_REPLY_BYTES:
                raise StudentError(f"{name} has answered more than {MOST_REPLY_BYTES >> 20} MiB")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _how(self) -> str:
        code = self._child.wait()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


@dataclass(frozen=True, slots=True)
class Offer:
    """An argument for a constructor: a number, or an object of the student's process, by the names it may have."""

    names: tuple[str, ...]
    value: int | Student

    def plain(self) -> dict[str, object]:
        """The offer as the student's process reads it."""
        if isinstance(self.value, Student):
            return {"names": self.names, "object": self.value.number}
        return {"names": self.names, "value": self.value}


class Student:
    """An object in the student's process."""

    def __init__(self, process: StudentProcess, number: int, name: str) -> None:
        self.name, self.number = name, number
        self._process = process

    def names(self) -> dict[str, bool]:
        """Whether each public attribute is a method, by its name. Raises StudentError."""
        return self._process.names(self.number)

    def extend(self, name: str, values: tuple[int, ...]) -> None:
        """Extend a list that is an attribute. Raises StudentError."""
        self._process.extend(self.number, name, values)

    def call(self, name: str, *args: object, **kwargs: object) -> Any:
        """Call a method. Raises StudentError."""
        return self._process.call(self.number, name, args, kwargs)

    def read(self, name: str) -> Any:
        """An attribute, or what the method of this name returns. Raises StudentError."""
        return self._process.read(self.number, name)
