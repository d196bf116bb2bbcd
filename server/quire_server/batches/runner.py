"""Runs the lines of unfinished batches, beside live requests and after a restart of the server.

Promises: a line runs until it has a result, which is on the disk before the line counts as done; lines under way when
the process ends are run again by the next one. Live requests come first: while there are any, few lines run.
Must not know: HTTP, routes, the engine.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire_server.background import begin
from quire_server.batches.checking import TROUBLE_SECONDS, InputChecks
from quire_server.batches.input import request_of
from quire_server.batches.records import Batch, Line, Owner, Status
from quire_server.batches.store import BatchStore
from quire_server.batches.usage import usage_of

TICK_SECONDS = 1.0  # between two looks at the clock: batches expire, live requests come and go
SWEEP_SECONDS = 300.0  # between two deletions of expired files
QUIET_SECONDS = 2.0  # without a live request, after which all seats are for lines
LEAST_WAIT, MOST_WAIT = 0.1, 30.0  # seconds before a line that was refused for now is sent again
MAX_ANSWER_BYTES = 16 << 20  # of one line
MAX_FAILURES = 3  # of the server itself, until its error is the line's result
_AHEAD = 64  # lines of a batch that are known before they start

log = logging.getLogger("quire.batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The reply to one line."""

    status: int
    body: bytes  # JSON
    request_id: str
    retry_seconds: float | None = None  # refused for now, to be sent again after this time; None: this is the answer
    is_failure: bool = False  # of the server, which may pass


_NOT_NOW = Answer(status=503, body=b"", request_id="")  # the line is run again by the next process

Send = Callable[[Owner, str, bytes], Awaitable[Answer]]  # owner, endpoint, body


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server as the runner knows it."""

    send: Send
    num_seats: Callable[[], int]  # lines that may run at once without live requests
    least_seats: Callable[[], int]  # lines that may run beside live requests
    is_live: Callable[[], bool]  # whether there are live requests now
    is_draining: Callable[[], bool]
    knows_model: Callable[[str | None], bool]
    max_line_bytes: int
    on_line: Callable[[bool], None] = lambda _ok: None  # a line has got its result
    on_backlog: Callable[[int], None] = lambda _number: None  # lines without a result, of all batches


@dataclass(slots=True, kw_only=True)
class _Work:
    """A batch in progress."""

    batch: Batch
    known: deque[Line] = field(default_factory=deque)  # to be started next
    read_to: int = 0  # the number of the last line that was known
    is_read: bool = False  # there are no further lines to be known
    running: set[asyncio.Task[None]] = field(default_factory=set)


class BatchRunner:
    """Runs the batches of one store for one server. `run` is its only task."""

    def __init__(self, store: BatchStore, server: Server) -> None:
        self._store = store
        self._server = server
        self._work: dict[str, _Work] = {}  # by batch
        self._changed = asyncio.Event()
        self._checks = InputChecks(
            store, max_line_bytes=server.max_line_bytes, knows_model=server.knows_model, on_end=self.wake
        )
        self._live_at = -QUIET_SECONDS
        self._swept_at = -SWEEP_SECONDS

    def wake(self) -> None:
        """Look again: a batch has come, its input has been checked, or it is to be cancelled."""
        self._changed.set()

    async def run(self) -> None:
        """Run until cancelled. A failure is logged, and tried again."""
        checking = begin(self._checks.run, "batch-checks")
        try:
            while True:
                self._changed.clear()  # before the round, which may end lines that it has looked at already
                try:
                    await self._round()
                except Exception as error:
                    is_disk = isinstance(error, OSError | sqlite3.Error)
                    log.error("batches wait for %g s: %s", TROUBLE_SECONDS, error, exc_info=not is_disk)
                    await asyncio.sleep(TROUBLE_SECONDS)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS):  # `wait_for` of Python 3.11 may lose a cancellation
                        await self._changed.wait()
        finally:
            checking.cancel()
            await asyncio.gather(checking, self._stop(*self._work.values()), return_exceptions=True)

    async def _round(self) -> None:
        """Bring every unfinished batch as far as it can get now."""
        if self._server.is_draining():
            return
        if time.monotonic() - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = time.monotonic()
            await self._store.run(self._store.delete_expired)
        unfinished = {batch.id: batch for batch in await self._store.run(self._store.unfinished)}
        for batch_id in [each for each in self._work if each not in unfinished]:
            await self._stop(self._work.pop(batch_id))
        for batch in unfinished.values():
            await self._advance(batch)
        await self._start_lines()
        await self._store.run(self._store.shrink)
        self._server.on_backlog(await self._store.run(self._store.num_unfinished_lines))

    async def _advance(self, batch: Batch) -> None:
        if batch.status in ("finalizing", "cancelling"):
            await self._end(batch)
        elif batch.expires_at <= self._store.now():
            await self._end(batch, "expired")
        elif batch.status == "validating":
            self._checks.add(batch)
        else:
            work = self._work.setdefault(batch.id, _Work(batch=batch))
            work.batch = batch
            await self._know_lines(work)
            if work.is_read and not work.known and not work.running:
                await self._end(batch, "completed")

    async def _end(self, unfinished_batch: Batch, ends_as: Status | None = None) -> None:
        """Stop the lines of a batch and write its files."""
        batch_id = unfinished_batch.id
        await self._checks.drop(unfinished_batch)
        work = self._work.pop(batch_id, None)
        if work is not None:
            await self._stop(work)
        if ends_as is not None:
            await self._store.run(self._store.end_lines, batch_id, ends_as)
        batch = await self._store.run(self._store.batch, batch_id)
        if batch is None:
            return
        words = _EXPIRED if batch.ends_as == "expired" else _CANCELLED

        def unfinished(line: Line) -> bytes:
            return _result(batch_id, line, error=words)

        ended = await self._store.run(self._store.finalize, batch_id, unfinished, usage_of)
        if ended is not None:
            log.info("%s is %s: %d of %d lines answered", ended.id, ended.status, ended.completed, ended.total)

    async def _know_lines(self, work: _Work) -> None:
        if work.is_read or len(work.known) > _AHEAD // 2:
            return

        def read() -> list[Line]:
            return self._store.open_lines(work.batch.id, after=work.read_to, limit=_AHEAD)

        lines = await self._store.run(read)
        work.known.extend(lines)
        work.is_read = len(lines) < _AHEAD
        work.read_to = lines[-1].number if lines else work.read_to

    async def _start_lines(self) -> None:
        """Start as many lines as may run now: each time one of the owner that has fewest, of its oldest batch."""
        running = Counter({work.batch.owner.name: 0 for work in self._work.values()})
        for work in self._work.values():
            running[work.batch.owner.name] += len(work.running)
        free = self._places() - running.total()
        while free > 0:
            ready = [work for work in self._work.values() if work.known]
            if not ready:
                return
            work = min(ready, key=lambda each: running[each.batch.owner.name])  # the first of equals is the oldest
            line = work.known.popleft()
            task = asyncio.create_task(self._run_line(work.batch, line), name=f"{work.batch.id} {line.number}")
            work.running.add(task)
            task.add_done_callback(work.running.discard)
            task.add_done_callback(lambda _: self._changed.set())
            running[work.batch.owner.name] += 1
            free -= 1
            if not work.known:
                await self._know_lines(work)

    def _places(self) -> int:
        """How many lines may run now."""
        now = time.monotonic()
        if self._server.is_live():
            self._live_at = now
        is_quiet = now - self._live_at >= QUIET_SECONDS
        return self._server.num_seats() if is_quiet else self._server.least_seats()

    async def _run_line(self, batch: Batch, line: Line) -> None:
        """Send a line until it has an answer, and keep that. Without one when the server drains or the disk fails."""
        has_result = False
        try:
            has_room = await self._store.run(self._store.has_room, batch.owner.name)
            answer = await self._answer(batch, line) if has_room else None
            if answer is _NOT_NOW:
                return
            is_ok = answer is not None and answer.status == 200 and len(answer.body) <= MAX_ANSWER_BYTES
            if answer is None or len(answer.body) > MAX_ANSWER_BYTES:
                result = _result(batch.id, line, error=_NO_ROOM if answer is None else _TOO_LARGE)
            else:
                result = _result(batch.id, line, answer=answer)

            def finish() -> bool:
                if self._store.finish_line(batch, line, result, ok=is_ok):
                    return is_ok
                # Lines that ran at once have taken the room.
                self._store.finish_line(batch, line, _result(batch.id, line, error=_NO_ROOM), ok=False)
                return False

            is_ok = await self._store.run(finish)
            has_result = True
            self._server.on_line(is_ok)
        except Exception:  # such as a full disk
            log.exception("%s, line %d is run again", batch.id, line.number)
            await asyncio.sleep(TROUBLE_SECONDS)
        finally:
            work = self._work.get(batch.id)
            if work is not None and not has_result:
                work.known.appendleft(line)

    async def _answer(self, batch: Batch, line: Line) -> Answer:
        """Send a line until it is answered; `_NOT_NOW` where the server drains."""
        num_failures = 0
        endpoint, body = await asyncio.to_thread(self._request, batch, line)
        while True:
            answer = await self._server.send(batch.owner, endpoint, body)
            num_failures += answer.is_failure
            if answer.retry_seconds is None or num_failures >= MAX_FAILURES:
                return answer
            if self._server.is_draining():
                return _NOT_NOW
            await asyncio.sleep(min(max(answer.retry_seconds, LEAST_WAIT), MOST_WAIT))

    def _request(self, batch: Batch, line: Line) -> tuple[str, bytes]:
        with self._store.content(batch.input_file).open("rb") as content:
            content.seek(line.offset)
            return request_of(content.read(line.size))

    async def _stop(self, *works: _Work) -> None:
        """Cancel lines, and wait until their requests have ended."""
        tasks = [task for work in works for task in work.running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_NO_ROOM = {
    "code": "file_quota_exceeded",
    "message": "This request was not executed: your files and results have as many bytes as they may; delete some.",
}
_TOO_LARGE = {
    "code": "answer_too_large",
    "message": f"The answer to this request has more than {MAX_ANSWER_BYTES} bytes; ask for less.",
}
_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
_CANCELLED = {"code": "batch_cancelled", "message": "This request was not executed before the batch was cancelled."}


def _result(batch_id: str, line: Line, *, answer: Answer | None = None, error: dict[str, str] | None = None) -> bytes:
    """The line of an output file."""
    response: dict[str, Any] | None = None
    if answer is not None:
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    return msgspec.json.encode(
        {
            "id": f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
    )
