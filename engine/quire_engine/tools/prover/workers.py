"""Runs the checks of a verdict in forked workers: one that dies or hangs is blamed on its check, and another goes on.

Promises: this process never touches the device; a check has `silence` seconds, and no path is begun after `budget`
seconds of checks, in which compilers do not count. Must not know: torch, kernels.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from quire_engine.execution.prover_process import ENDING, end_child
from quire_engine.execution.verdict import Verdict
from quire_engine.machine import die_with_parent

_COMPILING = 60.0  # seconds for one kernel, and for a worker to begin
_MOST_FAULTS = 12
_PIECE_BYTES = 1 << 16

Say = Callable[[Mapping[str, Any]], None]
Work = Callable[[Verdict, Say], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The time that checks may take, in seconds."""

    silence: float = 3.0  # of one check
    budget: float = 3.0  # after which no path is begun


class Broken(Exception):
    """A worker ended or hung before its first check; the text says how."""


def prove(
    work: Work,
    verdict: Verdict,
    patience: Patience,
    *,
    asked: Collection[str] = (),
    wait: Callable[[int, float], bool] | None = None,
) -> None:
    """Fill `verdict` by `work`, which says what it begins and finds (see `Watch`). Raises Broken.

    `asked`: paths for which there is always time. `wait`: tells whether a descriptor has something to read within so
    many seconds.
    """
    watch = Watch(verdict, patience, frozenset(asked), wait or _readable)
    for _ in range(_MOST_FAULTS):
        if watch.follow(*_fork(work, verdict)):
            return


def _fork(work: Work, verdict: Verdict) -> tuple[int, int]:
    """The pid of a worker, and where it says what it does."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    return _run(work, verdict, writer, parent)


def _run(work: Work, verdict: Verdict, writer: int, parent: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)

        def say(what: Mapping[str, Any]) -> None:
            os.write(writer, json.dumps(what).encode() + b"\n")

        work(verdict, say)
        code = 0
    finally:
        os._exit(code)  # nothing of the parent's is closed or flushed twice


class Watch:
    """Follows workers by the lines of JSON that they write, and keeps the verdict.

    `running`: [path, op, case] of the check that begins, with an empty path for the plain ops. `compiling`: whether a
    compiler is at work. `op`, `path`: [name, problem], a failed op or a path that is through. `ops_checked`: a bool,
    with `reference_pool` and `possible` as the verdict has them. `done`: the last line; `broken` in place
    of all others: the reason why no check can begin.
    """

    def __init__(
        self, verdict: Verdict, patience: Patience, asked: frozenset[str], wait: Callable[[int, float], bool]
    ) -> None:
        self._verdict, self._patience, self._asked, self._wait = verdict, patience, asked, wait
        self._spent = 0.0  # seconds of checks
        self._running: list[str] | None = None
        self._compiling = self._done = False

    def follow(self, pid: int, reader: int) -> bool:
        """Follow a worker to its end; whether no other one is needed. Raises Broken."""
        self._running, self._compiling, self._done = None, False, False
        rest, problem, seconds = b"", "", 0.0
        try:
            while not self._done:
                data = self._read(reader)
                if not data:
                    problem, seconds = (self._hung, 0.0) if data is None else ("", ENDING)
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._note(json.loads(line))
        finally:
            os.close(reader)
            code = end_child(pid, seconds=seconds)
        if not self._done:
            self._blame(problem or _how(code))
        return self._done

    def _read(self, reader: int) -> bytes | None:
        """Some bytes; none at the worker's end, and None where it takes too long."""
        checks = self._running is not None and not self._compiling
        started = time.monotonic()
        is_there = self._wait(reader, self._patience.silence if checks else _COMPILING)
        if checks:
            self._spent += time.monotonic() - started
        return os.read(reader, _PIECE_BYTES) if is_there else None

    @property
    def _is_late(self) -> bool:
        """Whether no other path may be begun."""
        left = self._asked & set(self._verdict.possible) - set(self._verdict.paths)
        return self._spent > self._patience.budget and not left

    @property
    def _hung(self) -> str:
        return f"did not come back within {self._patience.silence:g} seconds"

    def _note(self, said: Mapping[str, Any]) -> None:
        verdict = self._verdict
        if "running" in said:
            self._running = said["running"]
        if "broken" in said:
            raise Broken(said["broken"])
        if "op" in said:
            verdict.ops.setdefault(*said["op"])
        if "ops_checked" in said:
            verdict.ops_checked, verdict.reference_pool = True, said["reference_pool"]
            verdict.possible = tuple(said["possible"])
        if "path" in said:
            name, problem = said["path"]
            verdict.paths[name] = problem
            self._done = self._is_late
        self._compiling = said.get("compiling", False)
        self._done = self._done or "done" in said

    def _blame(self, problem: str) -> None:
        if self._running is None:
            raise Broken(problem)
        path, op, case = self._running
        if path:
            self._verdict.paths[path] = f"{op}, {case}: {problem}" if op else f"{case}: {problem}"
        else:
            self._verdict.ops[op] = f"{case}: {problem}"
        self._done = bool(path) and self._is_late


def _readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
