"""A log pipe that nobody reads any more, and one that is closed: the server serves on, and says later what was lost."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from e2e.served import Served
from hostile.row import Row

START_SECONDS, STOP_SECONDS = 90.0, 45.0
NUM_LINES = 5_000  # of some 400 bytes: more than a pipe and the queue hold
PATIENCE = 5.0  # for one reply; before it was for ever
PATH = "/v1/models/" + "m" * 250


@contextmanager
def unread(stderr: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server whose stderr is this descriptor, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, stdin=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx.get(f"{url}/health/ready", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, "not ready"
            time.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.wait()


async def nobody_reads(_: Served) -> str:
    reader, writer = os.pipe()
    with unread(writer) as (process, url):
        os.close(writer)
        worst = await _many_lines(url)
        body = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}
        started = time.monotonic()
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            reply = await client.post(f"{url}/v1/completions", json=body)
            assert reply.status_code == 200
            metrics = (await client.get(f"{url}/metrics")).text
        answered = time.monotonic() - started
        lost = next(float(line.split()[-1]) for line in metrics.splitlines() if "records_dropped_total{" in line)
        assert lost > 0, "more was logged than fits, and nothing is said to be lost"
        reading = asyncio.create_task(asyncio.to_thread(_read_all, reader))
        await asyncio.sleep(0.5)
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            await client.get(f"{url}/v1/models")
        process.terminate()
        code = await asyncio.to_thread(process.wait, STOP_SECONDS)
        text = await reading
    assert code == 0, f"exit code {code}"
    told = [line for line in text.splitlines() if "log lines were lost" in line]
    assert told, "the loss is not told"
    return (
        f"{NUM_LINES} lines logged, slowest reply {worst * 1000:.0f} ms, a completion and the metrics after it"
        f" {answered * 1000:.0f} ms; {lost:.0f} lines lost, told once read again: {told[0].split('quire: ')[1]!r}"
    )


async def closed(_: Served) -> str:
    reader, writer = os.pipe()
    with unread(writer) as (process, url):
        os.close(writer)
        os.close(reader)  # every write is answered with EPIPE from here on
        worst = await _many_lines(url, 500)
        process.terminate()
        started = time.monotonic()
        code = await asyncio.to_thread(process.wait, STOP_SECONDS)
    assert code == 0, f"exit code {code}"
    return f"500 lines logged, slowest reply {worst * 1000:.0f} ms, ended in {time.monotonic() - started:.1f} s"


async def never_read_at_the_end(_: Served) -> str:
    reader, writer = os.pipe()
    try:
        with unread(writer) as (process, url):
            os.close(writer)
            await _many_lines(url, 500)
            started = time.monotonic()
            process.terminate()
            code = await asyncio.to_thread(process.wait, STOP_SECONDS)
    finally:
        os.close(reader)
    assert code == 0, f"exit code {code}"
    return f"ended {time.monotonic() - started:.1f} s after SIGTERM, with code 0"


async def _many_lines(url: str, count: int = NUM_LINES) -> float:
    """Requests with a line each, eight at a time; seconds of the slowest."""
    worst = 0.0
    left = iter(range(count))

    async def client() -> None:
        nonlocal worst
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            for _ in left:
                started = time.monotonic()
                try:
                    reply = await http.get(url + PATH)
                except httpx.TimeoutException:
                    raise AssertionError(
                        f"no reply for {PATIENCE:g} s: the server waits for who reads its log"
                    ) from None
                assert reply.status_code == 404
                worst = max(worst, time.monotonic() - started)

    await asyncio.gather(*(client() for _ in range(8)))
    return worst


def _read_all(reader: int) -> str:
    data = b""
    while more := os.read(reader, 1 << 16):
        data += more
    os.close(reader)
    return data.decode()


async def lines_of_json(server: Served) -> str:
    """Whatever clients send."""
    ids = ["i" * 10_000, "\u202etxt", "a b", "\u00ff"]
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        for text in ["\x1b[31mred", "line\nline", "\u202e\u2066", "\U0001f600", "\x00", "u" * 10_000]:
            await client.post("/v1/completions", json={"prompt": text, "max_tokens": 2, "user": text, "model": text})
            await client.post("/v1/completions", json={"prompt": text, "max_tokens": 2, "user": text})
        for text in ids:
            await client.get("/v1/models", headers={"x-request-id": text.encode("utf-8")})
        await client.get("/%0a%1b%5b31m%e2%80%ae")
    await asyncio.sleep(0.5)
    lines = server.log().splitlines()
    records = [json.loads(line) for line in lines]
    of_requests = [record for record in records if record["logger"] == "quire.access"]
    assert len(of_requests) == 17, f"{len(of_requests)} lines for 17 requests"
    assert "red" not in server.log(), "the log has text of clients"
    return f"{len(lines)} lines, all JSON; 17 requests, 17 lines"


ROWS = (
    Row(name="log-unread", what="a log pipe that nobody reads any more", act=nobody_reads),
    Row(name="log-closed", what="a log pipe whose reader is gone", act=closed),
    Row(name="log-unread-at-the-end", what="SIGTERM while nobody reads the log", act=never_read_at_the_end),
    Row(name="log-json", what="hostile text in every place", act=lines_of_json, flags=("--log-format", "json")),
)
