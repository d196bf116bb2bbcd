"""The README's rows of a trained model: SmolLM2 beside llama.cpp's server, and its own answers with guessed tokens.

    make real-bench         (ARGS="--repeat 5" for more rounds)

Servers take turns at the same requests, and ratios are of one round. Then one server answers chats, each with guesses
from earlier text and without; the texts must be equal. Prompts of the second part are in the prefix cache, so that it
measures decoding. Prints rows for the tables of README.md and benchmarks/results/headline.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from quire_bench.own_server import own_server
from quire_bench.results import describe_machine
from quire_engine.machine import usable_cores
from quire_engine.own_modules import module_command
from quire_server.checkpoint.trained import fetch

MODEL, SHOWN = "smollm2", "SmolLM2-135M Q4_1"
LLAMA = Path(__file__).with_name("llama_server.py")
STREAMS, ANSWER_TOKENS = (1, 8), 128
LOAD = ("--requests", "8", "--input", "128", "--output", "64", "--vocab", "49000", "--token-ids")
SERVE = (MODEL, "--max-model-len", "1024", "--kv-memory", "512MiB")
PARAGRAPH = (
    "The ferry runs twice a day in winter. Its captain keeps a paper logbook, because the electronic one failed in a"
    " storm. She writes down the wind, the swell, the number of passengers, and anything odd that she has seen."
)
CODE = "\n".join(
    f"def read_{name}(row):\n    return row['{name}'].strip().lower()\n" for name in ("city", "name", "street")
)
TASKS = {
    "a text written again": f"Repeat this text twice, word for word:\n\n{PARAGRAPH}",
    "code written again": f"Write this code again, and add a function for the zip code:\n\n{CODE}",
    "a story": "Tell me a story about a ferry in winter.",
}


class Row(NamedTuple):
    """A row of the README's table."""

    what: str
    ours: float  # tok/s
    beside: str
    theirs: float  # tok/s
    ratios: Sequence[float]  # a round each

    def __str__(self) -> str:
        middle, low, high = statistics.median(self.ratios), min(self.ratios), max(self.ratios)
        worse = ", **worse**" if middle < 1 else ""
        return (
            f"| {self.what} | {self.ours:.1f} tok/s | {self.beside}: {self.theirs:.1f} tok/s"
            f" | {middle:.2f}x ({low:.2f}-{high:.2f}){worse} |"
        )


@asynccontextmanager
async def llama_server(file: Path) -> AsyncIterator[tuple[str, str]]:
    """The address of llama.cpp's server and its version, of the Python that LLAMA_SERVER_PYTHON names."""
    process = await asyncio.create_subprocess_exec(
        os.environ.get("LLAMA_SERVER_PYTHON", sys.executable),
        *(str(LLAMA), str(file), str(usable_cores()), str(max(STREAMS)), "512"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        if process.stdout is None:
            raise RuntimeError("no pipe")
        version, address = [(await process.stdout.readline()).decode().strip() for _ in range(2)]
        if not address:
            raise SystemExit("llama.cpp's server did not start")
        yield address, version
    finally:
        process.kill()
        await process.wait()


async def beside_llama(repeat: int) -> tuple[list[Row], str]:
    """Rows of both servers, and llama.cpp's version."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        async with own_server(SERVE) as ours, llama_server(fetch(MODEL)) as (theirs, version):
            servers = ("--url", f"{ours},quire", "--against", f"{theirs},llama-server")
            points = ("--concurrency", ",".join(map(str, STREAMS)), "--repeat", str(repeat), "--no-probe")
            command = module_command("quire_server.cli", "bench", *servers, *points, *LOAD, "--json", str(report))
            process = await asyncio.create_subprocess_exec(*command)
            if await process.wait():
                raise SystemExit("quire bench failed")
        found = json.loads(await asyncio.to_thread(report.read_bytes))
    rows = []
    for point in found["points"]:
        ours_at, theirs_at = point["servers"]
        rates = [[run["output_tok_s"] for run in each["rounds"]] for each in (ours_at, theirs_at)]
        many = f"{point['point']['value']:g}"
        what = f"{many} stream{'' if many == '1' else 's'}, {SHOWN}"
        rows.append(_row(what, "llama-server", *rates))
    return rows, version


def _row(what: str, beside: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return Row(what, statistics.median(ours), beside, statistics.median(theirs), ratios)


def answer(url: str, prompt: str, *, guesses: bool) -> tuple[str, float]:
    """A chat's text and its tokens a second."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "speculation": guesses,
    }
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    started = time.perf_counter()
    with urlopen(request, timeout=300) as reply:
        told = json.load(reply)
    seconds = time.perf_counter() - started
    return told["choices"][0]["message"]["content"], told["usage"]["completion_tokens"] / seconds


async def guessed(repeat: int) -> list[Row]:
    """Rows of answers with guesses from earlier text, beside the same without."""
    rows = []
    async with own_server((*SERVE, "--speculation", "suffix")) as url:
        for task, prompt in TASKS.items():
            wanted, _ = await asyncio.to_thread(answer, url, prompt, guesses=False)
            rates: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeat):
                for guesses, found in zip((True, False), rates, strict=True):
                    text, rate = await asyncio.to_thread(answer, url, prompt, guesses=guesses)
                    if text != wanted:
                        raise SystemExit(f"{task}: guesses change the answer")
                    found.append(rate)
            rows.append(_row(f"{task}, `--speculation suffix`, {SHOWN}", "without", *rates))
    return rows


async def measure(repeat: int) -> None:
    """Measure everything, and print the rows."""
    machine = describe_machine()
    rows, version = await beside_llama(repeat)
    rows += await guessed(repeat)
    print(f"\n{machine.processor}, {machine.cores} cores, load {machine.load_average:.1f} before; beside it {version}")
    print(f"medians of {repeat} rounds, lowest and highest ratio of a round\n")
    for row in rows:
        print(f"{row} {machine.processor}, {machine.cores} vCPU |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="real", description="The README's rows of a trained model.")
    parser.add_argument("--repeat", type=int, default=3, help="rounds [3]")
    asyncio.run(measure(parser.parse_args().repeat))
