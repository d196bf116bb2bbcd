"""llama.cpp's own benchmark, llama-bench, as a peer without a server: one stream, on the same GGUF file.

Promises: the program of mainline llama.cpp and that of ik_llama.cpp; the same lengths as for a server. It times a
prompt and an answer apart, with the answer's context empty: a request is made of both, its first token with the prompt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import msgspec

from quire_bench.records import OK, Record, Run
from quire_bench.servers import BenchError, ServerInfo
from quire_bench.workload import Job, LoadPoint
from quire_engine.machine import usable_cores

NAME = "llama-bench"
_SHOWN = 300  # characters of a complaint


class _Test(msgspec.Struct):
    """The report of one test in JSON, as far as both programs write it."""

    n_prompt: int
    n_gen: int
    samples_ns: list[int]
    build_commit: str = ""


def is_program(address: str) -> bool:
    """Whether a peer is that program's file, and no address."""
    return Path(address).name == NAME and "://" not in address


class LlamaBench:
    """The program, run anew for each load point with all its requests. Made by `find_program`."""

    def __init__(self, info: ServerInfo, program: str) -> None:
        self.info = info
        self._program = program

    async def run(self, point: LoadPoint, jobs: Iterable[Job], seconds: float | None) -> Run:
        """One request after the other by the program's own clock; those of other lengths begin before `seconds`."""
        run = Run(started=perf_counter())
        now = run.started
        for (prompt, output), count in Counter((len(job.prompt), job.output_tokens) for job in jobs).items():
            if seconds is not None and now - run.started >= seconds:
                break
            tests = await asked(self._program, self.info.model, prompt, output, count)
            for prefill, decode in zip(_seconds(tests, prompt, 0), _seconds(tests, 0, output), strict=True):
                arrivals = [now + prefill + decode * place / output for place in range(output)]
                run.in_flight.append((now, int(point.value)))
                run.records.append(
                    Record(
                        due=now,
                        sent=now,
                        arrivals=arrivals,
                        ended=arrivals[-1],
                        outcome=OK,
                        input_tokens=prompt,
                        asked_tokens=output,
                        output_tokens=output,
                    )
                )
                now = arrivals[-1]
        run.in_flight.append((now, 0))
        run.ended = now
        return run

    async def kv_use(self) -> None:
        """Return None: llama-bench tells of no cache."""

    async def close(self) -> None:
        """Each run has ended its process."""


async def find_program(program: str, name: str | None, file: str) -> LlamaBench:
    """Try it on the file. Raises BenchError when there is no such program, or when it cannot read the file."""
    tests = await asked(program, file, 1, 1, 1)
    _seconds(tests, 1, 0)
    info = ServerInfo(name=name or NAME, address="", model=file, version=tests[0].build_commit)
    return LlamaBench(info, program)


async def asked(program: str, file: str, prompt: int, output: int, count: int) -> list[_Test]:
    """Run the program and return its report of `count` prompts and answers of these lengths. Raises BenchError."""
    flags = {"-m": file, "-p": prompt, "-n": output, "-r": count, "-t": usable_cores(), "-o": "json"}
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *(str(word) for pair in flags.items() for word in pair),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise BenchError(f"{program} cannot be started: {error.strerror}") from None
    try:
        told, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        words = " ".join(complaint.decode(errors="replace").split())[-_SHOWN:]
        raise BenchError(f"{program} ended with {process.returncode}: {words}")
    try:
        return msgspec.json.decode(told, type=list[_Test])
    except msgspec.MsgspecError as error:
        raise BenchError(f"{program} -o json tells something else than was expected: {error}") from None


def _seconds(tests: list[_Test], prompt: int, output: int) -> list[float]:
    found = next((test for test in tests if (test.n_prompt, test.n_gen) == (prompt, output)), None)
    if found is None:
        raise BenchError(f"{NAME} told nothing of {prompt} tokens of a prompt and {output} of an answer")
    return [nanoseconds / 1e9 for nanoseconds in found.samples_ns]
