"""A thread that loads files beside the steps, one after the other, and survives each of them.

Promises: any exception of a load becomes a ModelLoadError of one line, which the load's future raises; a load that its
disk holds up is given up after a while with its thread, and another thread goes on with the rest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from quire_engine.contract.errors import ModelLoadError

T = TypeVar("T")

MOST_SECONDS = 120.0  # for one load, reading and packing
_MOST_STUCK = 8  # threads that were given up and have not come back; each may hold a file's content
_LONGEST_REASON = 200


class _Load(NamedTuple, Generic[T]):
    future: Future[T]
    path: str


class LoadThread(Generic[T]):
    """Runs `load(path)` for one path at a time in a daemon thread, which a process need not wait for to end."""

    def __init__(self, load: Callable[[str], T], name: str, *, seconds: float = MOST_SECONDS) -> None:
        self._load, self._name, self._seconds = load, name, seconds
        self._changed = threading.Condition()  # guards all below; never held during a load
        self._waiting: deque[_Load[T]] = deque()
        self._running: _Load[T] | None = None
        self._begun = 0.0  # when the running load began
        self._turn = 0  # number of the thread that may take loads; those before it were given up
        self._has_thread = False
        self._num_stuck = 0  # threads that were given up and still run

    def submit(self, path: str) -> Future[T]:
        """Load a path when those before it are done."""
        load: _Load[T] = _Load(Future(), path)
        with self._changed:
            self._waiting.append(load)
            self._start_thread()
            self._changed.notify_all()
        return load.future

    def give_up_overdue(self) -> None:
        """End the running load with a ModelLoadError if it has taken too long. Call it while loads are waited for."""
        with self._changed:
            running = self._running
            if running is None or time.monotonic() - self._begun < self._seconds:
                return
            self._running, self._has_thread = None, False
            self._turn += 1
            self._num_stuck += 1
            reason = f"{running.path}: not read within {self._seconds:g} seconds"
            running.future.set_exception(ModelLoadError(reason))
            self._start_thread()

    def _start_thread(self) -> None:
        if self._has_thread or not self._waiting:
            return
        if self._num_stuck >= _MOST_STUCK:
            reason = f"{self._num_stuck} loads before it have not come back from their disks"
            while self._waiting:
                load = self._waiting.popleft()
                load.future.set_exception(ModelLoadError(f"{load.path}: {reason}"))
            return
        self._has_thread = True
        threading.Thread(target=self._run, args=(self._turn,), name=self._name, daemon=True).start()

    def _run(self, turn: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                load = self._running = self._waiting.popleft()
                self._begun = time.monotonic()
            outcome = self._outcome(load.path)
            with self._changed:
                if self._turn != turn:
                    self._num_stuck -= 1
                    return
                self._running = None
            if isinstance(outcome, ModelLoadError):
                load.future.set_exception(outcome)
            else:
                load.future.set_result(outcome)
            del load, outcome  # a large adapter is not to be held until the next load

    def _outcome(self, path: str) -> T | ModelLoadError:
        try:
            return self._load(path)
        except ModelLoadError as error:
            return error
        except BaseException as error:  # a panic of a library in Rust is no Exception
            reason = type(error).__name__
            with suppress(Exception):
                reason = f"{reason}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
            return ModelLoadError(f"{path[:_LONGEST_REASON]}: cannot be loaded: {reason}")
