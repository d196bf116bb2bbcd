"""A thousand and two thousand connections at once, each with a completion: how soon probes beside them are answered.

The load is made in this process, on the cores that the server has. A host is called idle where its load was small
before and there are cores for the load, the probes, the server and the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections import Counter
from pathlib import Path

from e2e.served import Served
from hostile.http_bytes import address, post
from hostile.row import Row
from hostile.rows.clients_overload import quantile

COUNTS = (1000, 2000)
IDLE_SECONDS, BUSY_SECONDS = 0.25, 1.0  # which 99 of 100 probes may take
CORES = 4
BEFORE = 2.0  # seconds of probes before a burst
PATIENCE = 300.0  # seconds for the whole burst
PROBER = Path(__file__).parents[1] / "prober.py"
RAISED = ("--max-connections", "4096", "--max-num-queued-reqs", "4096")
Probes = list[tuple[float, int]]  # seconds, status


class Prober:
    """The process that probes; `ended` is what it was told."""

    def __init__(self, server: Served) -> None:
        self._address = address(server.url)

    async def __aenter__(self) -> Prober:
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROBER), self._address[0], str(self._address[1])),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._child.returncode is None:
            self._child.kill()
            await self._child.wait()

    async def ended(self) -> Probes:
        told, _ = await self._child.communicate(b"")
        return [(seconds, status) for seconds, status in json.loads(told)]


def client(server: Served, number: int) -> socket.socket:
    """One that connects and sends its completion in one go."""
    body = {"prompt": f"Number {number}. Once upon a time", "max_tokens": 4}
    sock = socket.create_connection(address(server.url))
    sock.sendall(post(server.url, "/v1/completions", body, headers="Connection: close\r\n"))
    return sock


async def answered(client: socket.socket) -> int:
    """The status of its reply; 0 for none."""
    try:
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            return int((await reader.readline()).split()[1])
        finally:
            writer.close()
    except (OSError, IndexError):
        return 0


async def burst(server: Served, count: int) -> tuple[Counter[int], float, Probes]:
    """The statuses of so many completions at once, their seconds, and the probes before and beside them."""
    async with Prober(server) as prober:
        await asyncio.sleep(BEFORE)
        began = time.perf_counter()
        async with asyncio.timeout(PATIENCE):
            clients = [client(server, number) for number in range(count)]
            statuses = await asyncio.gather(*(answered(each) for each in clients))
        return Counter(statuses), time.perf_counter() - began, await prober.ended()


async def measure(server: Served) -> str:
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    is_idle = cores >= CORES and load < cores / 4
    most = IDLE_SECONDS if is_idle else BUSY_SECONDS
    lines, late = [], []
    for count in COUNTS:
        statuses, took, probes = await burst(server, count)
        seconds = [each for each, _ in probes]
        told = ", ".join(f"{number} of status {status}" for status, number in sorted(statuses.items()))
        p99 = quantile(seconds, 0.99)
        lines.append(
            f"{count} at once answered in {took:.1f} s ({told}), {len(probes)} probes p50"
            f" {1e3 * quantile(seconds, 0.5):.0f} ms, p99 {1e3 * p99:.0f} ms, slowest {1e3 * max(seconds):.0f} ms,"
            f" {sum(status != 200 for _, status in probes)} failed"
        )
        if p99 > most or {status for _, status in probes} != {200} or not set(statuses) <= {200, 429, 503}:
            late.append(count)
    said = "; ".join(lines) + f"; {cores} cores, load {load:.1f} before, at most {1e3 * most:.0f} ms are right"
    assert not late, said
    return said


def _row(name: str, what: str, *flags: str) -> Row:
    return Row(name=name, what=f"1,000 and 2,000 connections at once, {what}", act=measure, flags=flags)


ROWS = (
    _row("burst", "with the usual limits"),
    _row("burst-raised", "with raised limits", *RAISED),
    _row("burst-servers", "to two API servers with raised limits", *RAISED, "--api-server-count", "2"),
)
