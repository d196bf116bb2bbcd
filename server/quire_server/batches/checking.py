"""Checks the inputs of new batches beside the lines that run: in short turns, in which owners alternate.

Promises: between two turns the store is free for results of lines; however many batches an owner has begun, another
owner's first one has every second turn. Must not know: HTTP, routes, the engine.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator

from quire_server.batches.input import MAX_LINES, Inspection, read_lines
from quire_server.batches.records import Batch, Line
from quire_server.batches.store import BatchStore, NoRoom

TURN_SECONDS = 0.02  # of one core at a stretch
TROUBLE_SECONDS = 5.0  # after a failure of the disk

log = logging.getLogger("quire.batches")


class _Check:
    """One batch's input, as far as it has been read."""

    def __init__(self, batch: Batch, lines: Iterator[list[Line]], found: Inspection) -> None:
        self.batch, self.lines, self.found = batch, lines, found
        self.is_begun = False
        self.is_wanted = True  # false: it has been checked, and the runner's view of it was old


class InputChecks:
    """The inputs of one store's new batches. `run` is their only task."""

    def __init__(
        self,
        store: BatchStore,
        *,
        max_line_bytes: int,
        knows_model: Callable[[str | None], bool],
        on_end: Callable[[], None],
    ) -> None:
        """`on_end`: a batch has begun, or has failed."""
        self._store, self._max_line_bytes, self._knows_model, self._on_end = store, max_line_bytes, knows_model, on_end
        self._owners: dict[str, dict[str, _Check]] = {}  # by owner and batch; the owner that had its turn last is last
        self._turn = asyncio.Lock()  # held for a turn
        self._changed = asyncio.Event()

    def add(self, batch: Batch) -> None:
        """Check the input of a batch, if that is not under way."""
        checks = self._owners.setdefault(batch.owner.name, {})
        if batch.id in checks:
            return
        found = Inspection()
        lines = read_lines(
            self._store.content(batch.input_file),
            endpoint=batch.endpoint,
            max_lines=MAX_LINES if batch.endpoint else None,
            max_line_bytes=self._max_line_bytes,
            knows_model=self._knows_model,
            found=found,
            turn_seconds=TURN_SECONDS,
        )
        checks[batch.id] = _Check(batch, lines, found)
        self._changed.set()

    async def drop(self, batch: Batch) -> None:
        """Check the input of this batch no further; after this no line of it is added."""
        async with self._turn:
            self._forget(batch)

    async def run(self) -> None:
        """Give turns until cancelled."""
        while True:
            await self._changed.wait()
            if not self._owners:
                self._changed.clear()
                continue
            started = time.monotonic()
            async with self._turn:
                has_failed = await self._next()
            # As long as the turn for everything else.
            await asyncio.sleep(TROUBLE_SECONDS if has_failed else min(time.monotonic() - started, TURN_SECONDS))

    async def _next(self) -> bool:
        """Give the owner that has waited longest a turn, for its oldest batch; whether the disk failed."""
        owner = next(iter(self._owners))
        self._owners[owner] = self._owners.pop(owner)
        check = next(iter(self._owners[owner].values()))
        try:
            is_read = await self._read_on(check)
            if is_read:
                await self._end(check)
        except (OSError, sqlite3.Error) as error:
            log.error("%s is checked again in %g s: %s", check.batch.id, TROUBLE_SECONDS, error)
            self._forget(check.batch)  # the next round of the runner adds it again
            return True
        except Exception:
            log.exception("the input of %s cannot be checked", check.batch.id)
            check.found.add("server_error", "the server could not check the file")
            self._forget(check.batch)
            await self._end(check)
            return False
        if is_read:
            self._forget(check.batch)
        return False

    async def _read_on(self, check: _Check) -> bool:
        """One turn; whether the input has been read to its end."""
        store, batch = self._store, check.batch
        if not check.is_begun:  # a process that ended may have read a part
            check.is_begun = check.is_wanted = await store.run(store.begin_check, batch.id)
        if not check.is_wanted:
            return True
        try:
            lines = await asyncio.to_thread(next, check.lines, None)
        except FileNotFoundError:  # taken from the folder by another program
            check.found.add("file_not_found", "the input file is gone")
            return True
        try:
            twice = await store.run(store.add_lines, batch, lines or ())
        except NoRoom:
            what = f"with this batch your files and batches would have more than {store.max_bytes} bytes; delete some"
            check.found.add("file_quota_exceeded", what)
            return True
        for line in twice:
            check.found.add("duplicate_custom_id", f"another line has it: {line.custom_id[:96]}", line=line.number)
        return lines is None

    async def _end(self, check: _Check) -> None:
        store, batch, found = self._store, check.batch, check.found
        if not check.is_wanted:
            return
        if found.problems:
            await store.run(store.fail, batch.id, found.problems)
            log.info("%s failed: %s", batch.id, found.problems[0].message)
        else:
            await store.run(lambda: store.begin(batch.id, model=found.model))
        self._on_end()

    def _forget(self, batch: Batch) -> None:
        checks = self._owners.get(batch.owner.name, {})
        checks.pop(batch.id, None)
        if not checks:
            self._owners.pop(batch.owner.name, None)
