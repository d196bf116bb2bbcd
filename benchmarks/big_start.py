"""What a big model's starts and crashes take: the first start, the second one, and a kill of the engine under streams.

    python benchmarks/make_big.py DIRECTORY
    python benchmarks/big_start.py DIRECTORY --cache EMPTY_DIRECTORY [-- flags of quire serve]

Nothing else should run meanwhile. The first start packs, the second one reads the packed weights from their file. Then
streams run once undisturbed and once with the engine killed in the middle; both must give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import httpx
import psutil

_ADDRESS = re.compile(r"Uvicorn running on (http://127\.0\.0\.1:\d+)")
_QUANTIZATION = "int4"


class Server:
    """`quire serve` until the end of the block; how long it took to be ready."""

    def __init__(self, model: Path, cache: Path, flags: list[str]) -> None:
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115  # closed in __exit__
        listening = ["--host", "127.0.0.1", "--port", "0", "--packed-cache", str(cache)]
        command = [sys.executable, "-P", "-m", "quire_server.cli", "serve", str(model), *listening, *flags]
        self._started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.url = ""
        self.seconds = 0.0

    def __enter__(self) -> Server:
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.log()}")
            found = _ADDRESS.search(self.log())
            try:
                if found and httpx.get(found[1] + "/health/ready", timeout=5).status_code == 200:
                    self.url, self.seconds = found[1], time.monotonic() - self._started
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self._log.close()

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def engine(self) -> psutil.Process:
        """The engine, which is older than the process that waits to be the next one."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):  # it is ending
                if "quire_engine.process" in child.cmdline():
                    found.append(child)
        return min(found, key=psutil.Process.create_time)


async def stream(client: httpx.AsyncClient, url: str, number: int, tokens: int) -> tuple[str, list[float]]:
    """The text of one stream, and when each of its parts came."""
    body = {
        "prompt": [100 + number, 200, 300, 400 + number],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    times = []
    async with client.stream("POST", url + "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"])
            for choice in event["choices"]:
                times.append(time.monotonic())
                ids += choice.get("token_ids") or []
    return str(ids), times


async def streams(
    server: Server, count: int, tokens: int, *, kill: bool, after: float = 5.0
) -> tuple[list[str], float, float]:
    """All tokens, the longest gap after the kill and the longest before it. The kill comes `after` so many seconds."""
    killed = float("inf")
    async with httpx.AsyncClient(timeout=600) as client:
        tasks = [asyncio.create_task(stream(client, server.url, number, tokens)) for number in range(count)]
        if kill:
            await asyncio.sleep(after)
            killed = time.monotonic()
            os.kill(server.engine().pid, signal.SIGKILL)
        found = await asyncio.gather(*tasks)
    usual = stall = 0.0
    for _, times in found:
        for one, next_one in pairwise(times):
            if next_one >= killed:  # what was on its way at the kill comes first
                stall = max(stall, next_one - max(one, killed))
            elif next_one < killed:
                usual = max(usual, next_one - one)
    return [text for text, _ in found], stall, usual


def main() -> int:
    parser = argparse.ArgumentParser(prog="big_start", description="Measure starts and crashes of a big model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=Path, required=True, help="directory for packed weights; empty at first")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40)
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:split])
    flags = words[split + 1 :] or ["--quantization", _QUANTIZATION, "--max-model-len", "1024"]
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {' '.join(flags)}", flush=True)
    with Server(given.model, given.cache, flags) as server:
        lines = [line for line in server.log().splitlines() if "loading the model" in line]
        print(f"first start: ready after {server.seconds:.1f} s, {len(lines)} lines of progress, such as", flush=True)
        print("\n".join(lines[:2] + lines[-1:]), flush=True)
        while not list(given.cache.glob("*.packed")):
            time.sleep(0.1)
        print(f"file of packed weights: {next(given.cache.glob('*.packed')).stat().st_size / 1e9:.2f} GB", flush=True)
    with Server(given.model, given.cache, flags) as server:
        print(f"second start: ready after {server.seconds:.1f} s", flush=True)
        expected, _, usual = asyncio.run(streams(server, given.streams, given.tokens, kill=False))
        print(f"{given.streams} streams undisturbed: longest gap {usual:.2f} s", flush=True)
        got, stall, usual = asyncio.run(streams(server, given.streams, given.tokens, kill=True))
        same = "identical" if got == expected else "DIFFERENT"
        print(f"engine killed: {same}; next token {stall:.2f} s after the kill, before it at most {usual:.2f} s apart")
    return 0 if got == expected else 1


if __name__ == "__main__":
    sys.exit(main())
