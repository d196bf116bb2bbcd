"""Starts `quire serve` for a benchmark and stops it afterwards.

Promises: a free port of this machine, ready when entered; gone when left, whatever happened in between.
"""

from __future__ import annotations

import asyncio
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from quire_bench.servers import BenchError
from quire_engine.own_modules import module_command

_ADDRESS = re.compile(r"Uvicorn running on (http://[^\s\"]+)")
_START_SECONDS = 600.0  # a big model on a slow disk
_STOP_SECONDS = 60.0
_SHOWN = 2000  # characters of a log


@asynccontextmanager
async def own_server(arguments: Sequence[str]) -> AsyncIterator[str]:
    """The address of a server started with these flags. Raises BenchError with its last words if it does not start."""
    command = module_command("quire_server.cli", "serve", *arguments)
    with tempfile.NamedTemporaryFile(prefix="quire-bench-", suffix=".log") as file:
        process = await asyncio.create_subprocess_exec(
            *command, "--host", "127.0.0.1", "--port", "0", stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file
        )
        try:
            yield await _address(process, Path(file.name))
        finally:
            await _stop(process)


async def _address(process: asyncio.subprocess.Process, log: Path) -> str:
    """The log line comes when the model is loaded and requests are taken."""
    for _ in range(int(_START_SECONDS / 0.05)):
        text = await asyncio.to_thread(log.read_text, errors="replace")
        if match := _ADDRESS.search(text):
            return match[1]
        if process.returncode is not None:
            raise BenchError(f"quire serve ended with {process.returncode}:\n{text[-_SHOWN:].rstrip()}")
        await asyncio.sleep(0.05)
    raise BenchError(f"quire serve was not ready after {_START_SECONDS:g} s:\n{text[-_SHOWN:].rstrip()}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
