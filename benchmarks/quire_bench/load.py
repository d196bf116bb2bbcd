"""Drives load: a closed loop keeps a number of streams busy, an open loop sends when requests are due.

Promises: in an open loop nothing that a server does delays an arrival, and latencies count from when a request was due.
Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from time import perf_counter

from quire_bench.records import Record, Run
from quire_bench.workload import Job

_PAUSE = 0.05  # seconds before a stream whose request failed sends its next: a dead server is not hammered

Send = Callable[[Job, Record], Awaitable[None]]


class _Driver:
    """Sends single requests and follows how many are in flight."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._in_flight = 0
        self.run = Run(started=perf_counter())

    async def one(self, job: Job, due: float | None) -> Record:
        self._step(1)
        record = Record(due=perf_counter() if due is None else due, input_tokens=len(job.prompt))
        record.asked_tokens = job.output_tokens
        try:
            await self._send(job, record)
        finally:
            self.run.records.append(record)
            self._step(-1)
        return record

    def _step(self, change: int) -> None:
        self._in_flight += change
        self.run.in_flight.append((perf_counter(), self._in_flight))

    def finish(self) -> Run:
        self.run.ended = perf_counter()
        return self.run


async def closed_loop(send: Send, jobs: Iterable[Job], *, streams: int, seconds: float | None = None) -> Run:
    """Each of `streams` sends its next request when its last one has ended; none is begun after `seconds`."""
    waiting: Iterator[Job] = iter(jobs)
    driver = _Driver(send)
    stop = driver.run.started + seconds if seconds is not None else float("inf")

    async def stream() -> None:
        for job in waiting:  # shared: each job is taken once
            record = await driver.one(job, None)
            if perf_counter() >= stop:
                return
            if not record.is_ok:
                await asyncio.sleep(_PAUSE)

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
    return driver.finish()


async def open_loop(send: Send, jobs: Iterable[Job]) -> Run:
    """Every request is sent when it is due, whatever became of those before it."""
    prepared = list(jobs)
    driver = _Driver(send)
    start = driver.run.started
    async with asyncio.TaskGroup() as group:
        for job in prepared:
            due = start + job.due
            pause = due - perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            group.create_task(driver.one(job, due))
    return driver.finish()
