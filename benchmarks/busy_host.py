"""What is left of a server's speed when another process keeps one core busy, with all its threads and with one.

    python benchmarks/make_big.py DIRECTORY --scale 0.005
    python benchmarks/busy_host.py DIRECTORY [--rounds 5] [--against SOURCE_TREE]

Each round measures every server at 1 and 8 streams: undisturbed, beside a loop that is pinned to the first core or to
the last one, and beside one that the system may move. Ratios are of one round; the ranges are over the rounds. With
`--against` the same servers run from another source tree in the same rounds, for a comparison. Ends by itself, and ends
what it started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

STREAMS = (1, 8)
PROMPT_TOKENS = 16
CONDITIONS = ("undisturbed", "first core", "last core", "any core")
_ADDRESS = re.compile(r"Uvicorn running on (http://127\.0\.0\.1:\d+)")
# Ends with whoever started it, and in any case after ten minutes.
_LOOP = """
import os, time
parent, end = os.getppid(), time.monotonic() + 600
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def disturbance(condition: str) -> Iterator[None]:
    """A process at normal priority that computes without end, on the core that the condition names."""
    if condition == "undisturbed":
        yield
        return
    # In a session of its own: systems that share their cores between sessions take it for somebody else.
    loop = subprocess.Popen([sys.executable, "-I", "-S", "-c", _LOOP], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        cores = sorted(os.sched_getaffinity(0))
        if condition != "any core":
            os.sched_setaffinity(loop.pid, {cores[0] if condition == "first core" else cores[-1]})
        time.sleep(0.5)  # the system has placed it, and the interpreter has started
        yield
    finally:
        loop.kill()
        loop.wait()


@contextmanager
def serving(model: Path, flags: list[str], tree: Path | None) -> Iterator[str]:
    """The address of `quire serve`, of this source tree or of another one."""
    environment = dict(os.environ)
    if tree is not None:
        environment["PYTHONPATH"] = ":".join(str(tree / part) for part in ("server", "engine", "kernels", "benchmarks"))
    with tempfile.NamedTemporaryFile(mode="w+", suffix=".log") as log:
        command = [
            sys.executable,
            "-P",
            "-m",
            "quire_server.cli",
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        server = subprocess.Popen(
            command + flags, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            while True:
                said = Path(log.name).read_text()
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended:\n{said}")
                found = _ADDRESS.search(said)
                if found and _is_ready(found[1]):
                    break
                time.sleep(0.05)
            yield found[1]
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


async def tokens_per_second(url: str, streams: int, tokens: int) -> float:
    """Of `streams` requests that begin together and have as many tokens to come."""

    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {
            "prompt": [100 + number + i for i in range(PROMPT_TOKENS)],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        reply = await client.post(url + "/v1/completions", json=body)
        reply.raise_for_status()
        return int(reply.json()["usage"]["completion_tokens"])

    async with httpx.AsyncClient(timeout=300) as client:
        started = time.monotonic()
        counts = await asyncio.gather(*(one(client, number) for number in range(streams)))
        return sum(counts) / (time.monotonic() - started)


def measure(urls: dict[str, str], rounds: int, tokens: int) -> Iterator[dict[tuple[str, str, int], float]]:
    """Of each round: tokens per second by server, condition and number of streams."""
    for url in urls.values():
        for streams in STREAMS:
            asyncio.run(tokens_per_second(url, streams, tokens // 4))
    for number in range(rounds):
        servers = list(urls.items()) if number % 2 == 0 else list(urls.items())[::-1]
        found = {}
        for condition in CONDITIONS:
            with disturbance(condition):
                for streams in STREAMS:
                    for name, url in servers:
                        found[name, condition, streams] = asyncio.run(tokens_per_second(url, streams, tokens))
        yield found


def _spread(values: list[float], digits: int = 2) -> str:
    middle, low, high = (f"{x:.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def report(rounds: list[dict[tuple[str, str, int], float]]) -> Iterator[str]:
    """A table's lines: what each condition leaves of a server's speed, and how it compares with one thread."""
    yield "| server | streams | neighbour | tok/s | of undisturbed | of `--num-threads 1` |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, condition, streams in rounds[0]:
        rates = [found[name, condition, streams] for found in rounds]
        of_quiet = [found[name, condition, streams] / found[name, "undisturbed", streams] for found in rounds]
        alone = name.split(",")[0] + ", one thread"
        of_one = [found[name, condition, streams] / found[alone, condition, streams] for found in rounds]
        cells = (name, f"c={streams}", condition, _spread(rates, 0), _spread(of_quiet), _spread(of_one))
        yield "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="busy_host", description="Measure servers beside a process that computes.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--against", type=Path, metavar="SOURCE_TREE", help="compare with the servers of another tree")
    parser.add_argument("--minutes", type=int, default=20, help="after which it gives up")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:split])
    flags = ["--max-model-len", "1024", "--no-enable-prefix-caching", *words[split + 1 :]]
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"gave up after {given.minutes} minutes"))
    signal.alarm(60 * given.minutes)
    trees = {"this tree": None} if given.against is None else {"this tree": None, str(given.against): given.against}
    print(
        f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores; {' '.join(flags)}", flush=True
    )
    with ExitStack() as stack:
        urls = {}
        for tree, path in trees.items():
            urls[f"{tree}, default"] = stack.enter_context(serving(given.model, flags, path))
            urls[f"{tree}, one thread"] = stack.enter_context(
                serving(given.model, [*flags, "--num-threads", "1"], path)
            )
        rounds = []
        for found in measure(urls, given.rounds, given.tokens):
            rounds.append(found)
            print(f"round {len(rounds)} of {given.rounds} done", file=sys.stderr, flush=True)
    for line in report(rounds):
        print(line)
    if given.json is not None:
        given.json.write_text(json.dumps([[[*key, rate] for key, rate in found.items()] for found in rounds], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
