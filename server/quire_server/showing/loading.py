"""Shows the progress of a model's load, or of a batch: a bar on a terminal, a line every few seconds elsewhere.

Promises: a load of a second shows nothing; all output goes to stderr and ends with the load. Must not know: processes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from quire_engine.memory_plan import bytes_text

log = logging.getLogger("quire.loading")

_QUIET_SECONDS = 1.0
_SECONDS_BETWEEN_LINES = 10.0
_LOOK_SECONDS = 0.2


def _log_line(line: str) -> None:
    log.info("%s", line)


Update = Callable[[str, int, int], None]  # a phase in a few words, bytes done, of how many (0: not known)


class Word(Protocol):
    """The latest progress of a load, as the engine reports it."""

    @property
    def phase(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...


class Lines:
    """Logs the latest progress every few seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._begun = self._said = clock()
        self._phase, self._phase_begun = "", self._begun

    def update(self, phase: str, done: int, total: int) -> None:
        """Take in the latest progress, which may be unchanged."""
        now = self._clock()
        if phase != self._phase:
            self._phase, self._phase_begun = phase, now
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = now
        line = f"loading the model, {now - self._begun:.0f} s so far: {phase}"
        if total:
            line += f", {bytes_text(done)} of {bytes_text(total)} ({100 * done // total} %)"
            spent = now - self._phase_begun
            if done and spent >= 1:
                line += f", about {spent * (total - done) / done:.0f} s left"
        self._say(line)


@contextmanager
def shown(*, bar: bool, say: Callable[[str], None] = _log_line) -> Iterator[Update]:
    """Yields the function to call with each progress; without a bar, `say` gets a line from time to time."""
    if not bar:
        yield Lines(say).update
        return
    # Imported here, since most starts end before there is anything to show.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        latest = ""

        def update(phase: str, done: int, total: int) -> None:
            nonlocal latest
            if phase != latest:
                latest = phase
                progress.reset(task, description=phase, total=total or None)
            progress.update(task, completed=done, total=total or None)

        yield update


def has_terminal() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr.isatty()


async def show(latest: Callable[[], Word | None], loaded: asyncio.Future[Any], *, bar: bool) -> None:
    """Show the progress until `loaded` is done; `latest` returns the current progress."""
    await asyncio.wait([loaded], timeout=_QUIET_SECONDS)
    if loaded.done():
        return
    with shown(bar=bar) as update:
        while not loaded.done():
            word = latest()
            if word is not None:
                update(word.phase, word.done, word.total)
            await asyncio.wait([loaded], timeout=_LOOK_SECONDS)


Answered = Callable[[int, int, int], None]  # lines with a result, of how many (0: not known), those with errors


@contextmanager
def answered_lines(*, bar: bool, clock: Callable[[], float] = time.monotonic) -> Iterator[Answered]:
    """Yields the function to call with the progress of a batch: a bar, or a line in the log every few seconds."""
    if not bar:
        said = clock()

        def say(done: int, total: int, failed: int) -> None:
            nonlocal said
            if clock() - said >= _SECONDS_BETWEEN_LINES:
                said = clock()
                log.info("%d of %d lines, %d with errors", done, total, failed)

        yield say
        return
    # Imported here, since a run without a terminal does not need it.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("answered lines"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[errors]} errors"), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None, errors=0)

        def draw(done: int, total: int, failed: int) -> None:
            progress.update(task, total=total or None, completed=done, errors=failed)

        yield draw
