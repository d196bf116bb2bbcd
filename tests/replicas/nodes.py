"""Mixed streams on two nodes through all that may happen to them, held against one engine: `make replica-test`.

Nodes are killed, stopped, cut off in either direction and replaced one after the other, while strangers send 10,000
messages that are no greeting. Expected and got are printed for each promise, with exit code 1 where one is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil

from e2e.served import Served
from e2e.served_node import ServedNode
from quire_engine.links.handshake import HELLO_BYTES
from quire_server.engine.nodes.addresses import parse_address
from replicas.__main__ import FLAGS, cpu_variant, replicas, told
from replicas.streams import Said, differences, reached, streams
from support.nodes import Proxy, proxy

SILENCE = 3.0  # seconds
LIMITS = f"replica_silence={SILENCE}"
NODE = ("--max-model-len", "1024", "--kv-memory", "24MiB")


@contextmanager
def proxies(nodes: list[ServedNode]) -> Iterator[list[Proxy]]:
    """One before each node, in a thread with a loop of its own."""
    loop, made, stop = asyncio.new_event_loop(), [], asyncio.Event()
    ready = threading.Event()

    async def serve() -> None:
        async with proxy(parse_address(nodes[0].address, "")) as one, proxy(parse_address(nodes[1].address, "")) as two:
            made.extend([one, two])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def garbled(node: ServedNode, count: int) -> int:
    """Send so many messages that are no greeting; returns how many connections were ended without a word."""
    address, rng, refused = parse_address(node.address, ""), random.Random(0), 0
    for _ in range(count):
        try:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            await reader.readexactly(HELLO_BYTES)
            writer.write(rng.randbytes(rng.choice((HELLO_BYTES, HELLO_BYTES, 4096))))
            refused += await reader.read(1) == b""
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            refused += 1
    return refused


class Trouble:
    """All that happens to the nodes, one after the other, each under streams of its own."""

    def __init__(self, server: Served, nodes: list[ServedNode], between: list[Proxy]) -> None:
        self.done: list[str] = []
        self.noticed: list[float] = []  # seconds from a cut to its notice
        self._server, self._nodes, self._between = server, nodes, between

    async def both_ready(self) -> None:
        """Looked at, not told, as the next one."""
        while sum(row["state"] == "ready" for row in await asyncio.to_thread(replicas, self._server)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _until_noticed(self, number: int) -> None:
        began = time.monotonic()
        while (await asyncio.to_thread(replicas, self._server))[number]["state"] == "ready":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        self.noticed.append(time.monotonic() - began)

    async def kill(self) -> None:
        self._nodes[0].process.kill()
        self._nodes[0].process.wait()
        await asyncio.to_thread(self._nodes[0].start)

    async def stop(self) -> None:
        self._nodes[1].process.send_signal(signal.SIGSTOP)
        await self._until_noticed(1)
        self._nodes[1].process.send_signal(signal.SIGCONT)

    async def cut_to_node(self) -> None:
        self._between[0].to_node = False
        await self._until_noticed(0)
        self._between[0].heal()
        self._between[0].end_connections()

    async def cut_to_front(self) -> None:
        self._between[1].to_front = False
        await self._until_noticed(1)
        self._between[1].heal()
        self._between[1].end_connections()

    async def kill_engine(self) -> None:
        rows = await asyncio.to_thread(replicas, self._server)
        os.kill(rows[0]["pid"], signal.SIGKILL)

    async def roll(self) -> None:
        for node in self._nodes:
            await asyncio.to_thread(node.stop)
            await asyncio.to_thread(node.start)
            await self.both_ready()

    async def all(self, count: int) -> list[list[Said]]:
        """So many streams for each event, which comes when a fifth of their chunks have."""
        waves = []
        for event in (self.kill, self.stop, self.cut_to_node, self.cut_to_front, self.kill_engine, self.roll):
            await self.both_ready()
            due = asyncio.Event()
            running = asyncio.create_task(streams(self._server.url, count, _at(0.2, due)))
            await due.wait()
            await event()
            waves.append(await running)
            self.done.append(event.__name__)
        return waves


def _at(goal: float, due: asyncio.Event) -> Callable[[Callable[[], float]], Any]:
    async def disturb(share: Callable[[], float]) -> None:
        await reached(share, goal)
        due.set()

    return disturb


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m replicas.nodes", description=__doc__)
    parser.add_argument("--streams", type=int, default=100, help="for each event")
    parser.add_argument("--garbled", type=int, default=10_000)
    given = parser.parse_args()
    with Served(*FLAGS) as alone:
        variant = cpu_variant(alone)
        expected = asyncio.run(streams(alone.url, given.streams))
    with ExitStack() as stack:
        nodes = [stack.enter_context(ServedNode(*NODE, *variant, limits=LIMITS)) for _ in range(2)]
        between = stack.enter_context(proxies(nodes))
        engines = ",".join(str(each.address) for each in between)
        front = Served("--engines", engines, *FLAGS[2:], limits=LIMITS)
        server = stack.enter_context(front)
        trouble = Trouble(server, nodes, between)
        asyncio.run(trouble.both_ready())
        waves = asyncio.run(trouble.all(given.streams))
        moved = server.metric("quire_streams_moved_total")
        server.wait_idle(30)
        process = psutil.Process(nodes[0].process.pid)
        asyncio.run(garbled(nodes[0], 200))
        handles, memory, engine = process.num_fds(), process.memory_info().rss, replicas(server)[0]["pid"]
        refused = asyncio.run(garbled(nodes[0], given.garbled))
        grown = (process.memory_info().rss - memory) / 2**20
        more, same = process.num_fds() - handles, engine == replicas(server)[0]["pid"]
    broken = [
        f"{name}: {line}" for name, got in zip(trouble.done, waves, strict=True) for line in differences(expected, got)
    ]
    for line in broken[:20]:
        print(line)
    errors, count = sum(len(said.errors) for got in waves for said in got), len(trouble.done) * given.streams
    slowest = max(trouble.noticed, default=0.0)
    good = [
        told("streams with all their text", count, count - len(broken), holds=not broken),
        told("errors", 0, errors, holds=errors == 0),
        told("events", 6, ", ".join(trouble.done), holds=len(trouble.done) == 6),
        told("streams moved", "more than 0", int(moved), holds=moved > 0),
        told("silence noticed, seconds", f"{SILENCE + 2:g}", f"{slowest:.1f}", holds=0 < slowest <= SILENCE + 2),
        told("garbled messages refused", given.garbled, refused, holds=refused == given.garbled),
        told("handles more after them", "at most 4", more, holds=more <= 4),
        told("MiB more after them", "at most 8", f"{grown:.1f}", holds=grown <= 8),
        told("engines restarted by them", 0, int(not same), holds=same),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
