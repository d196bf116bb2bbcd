"""Baselines without a server: a process that computes one static batch after the other.

Promises: the same requests and the same numbers as for a server; a batch is as wide as the closed loop's streams. Must
not know: torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from itertools import islice
from time import perf_counter

import msgspec

from quire_bench.records import OK, Record, Run
from quire_bench.servers import BenchError, ServerInfo
from quire_bench.workload import Job, LoadPoint
from quire_engine.contract.config import EngineConfig
from quire_engine.own_modules import module_command

BASELINES: Mapping[str, str] = {
    "hf-generate": "quire_engine.tools.baselines.hf_generate",
    "static": "quire_engine.tools.baselines.static",
}
_LINE_BYTES = 1 << 28


class _Reply(msgspec.Struct):
    times: list[list[float]] = []
    error: str = ""


class Baseline:
    """One baseline process. Made by `start_baseline`."""

    def __init__(self, name: str, config: EngineConfig, process: asyncio.subprocess.Process) -> None:
        self.info = ServerInfo(name=name, address="", model=config.model)
        self._process = process

    async def run(self, point: LoadPoint, jobs: Iterable[Job], seconds: float | None) -> Run:
        """Batches of `point.value` requests, none begun after `seconds`."""
        run = Run(started=perf_counter())
        remaining = iter(jobs)
        while batch := list(islice(remaining, int(point.value))):
            await self._batch(batch, run)
            if seconds is not None and perf_counter() - run.started >= seconds:
                break
        run.ended = perf_counter()
        return run

    async def kv_use(self) -> None:
        """A baseline has no paged cache."""

    async def _batch(self, batch: list[Job], run: Run) -> None:
        started = perf_counter()
        run.in_flight.append((started, len(batch)))
        reply = await self.ask([(job.prompt, job.output_tokens) for job in batch])
        for job, times in zip(batch, reply.times, strict=True):
            arrivals = [started + time for time in times]
            run.records.append(
                Record(
                    due=started,
                    sent=started,
                    arrivals=arrivals,
                    ended=arrivals[-1],
                    outcome=OK,
                    input_tokens=len(job.prompt),
                    asked_tokens=job.output_tokens,
                    output_tokens=len(arrivals),
                )
            )
        for count, ended in enumerate(sorted(record.ended for record in run.records[-len(batch) :]), start=1):
            run.in_flight.append((ended, len(batch) - count))

    async def ask(self, question: object) -> _Reply:
        """One line there and one back. BenchError when the process gives up."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(question) + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except ConnectionError:
            line = b""
        if not line:
            raise BenchError(f"the baseline {self.info.name} has ended")
        reply = msgspec.json.decode(line, type=_Reply)
        if reply.error:
            raise BenchError(f"the baseline {self.info.name} cannot run: {reply.error}")
        return reply

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def start_baseline(name: str, config: EngineConfig, *, streams: int) -> Baseline:
    """Load the model of `config` for batches of up to `streams` requests. Raises BenchError."""
    process = await asyncio.create_subprocess_exec(
        *module_command(BASELINES[name]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )
    tokens = max(config.limits.max_num_batched_tokens, streams + config.limits.min_chunk)
    config = replace(config, limits=replace(config.limits, max_num_seqs=streams, max_num_batched_tokens=tokens))
    baseline = Baseline(name, config, process)
    try:
        await baseline.ask(asdict(config))
    except BaseException:
        await baseline.close()
        raise
    return baseline
