"""Streams with long prompts that one node computes for another, through all that may happen, held against one engine.

The node of prompts is killed and replaced, so is the node of answers, a byte is flipped on the wire between them, the
wire is slow, and the node of prompts is slower than the one of answers. Expected and got are printed for each promise,
with exit code 1 where one is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import httpx

from e2e.served import Served
from e2e.served_node import ServedNode
from quire_engine.contract.config import KVTransport
from replicas.__main__ import FLAGS, cpu_variant, replicas, told
from replicas.streams import reached
from support.kv_wire import KVWire

MOST = 24  # streams at once
LEASE_SECONDS = 15.0
SLOW_WIRE = 1_000_000.0  # bytes a second
LATER, LATE_SECONDS = 1.2, 0.01  # of a first token whose prompt another node computes; the second for a busy host
TIMED_TOKENS = 1450  # of the prompts whose first tokens are timed
OF_FRONTS = ("--max-num-queued-reqs", "4096", "--disable-access-log")
# A thread each: two nodes of one machine must not be slower for the other's sake.
OF_NODES = ("--kv-memory", "48MiB", "--packed-cache", "off", "--num-threads", "1")
PATIENT = "replica_silence=5"


@dataclass(slots=True)
class Stream:
    """What a client got, and when."""

    token_ids: list[list[int]] = field(default_factory=list)
    error: str = ""
    cached: int = 0
    first: float = 0.0  # seconds to the first token


def asked(number: int) -> dict[str, Any]:
    """The body of the stream of this number: a prompt of 500 to 1,500 tokens of its own, every eighth one shared."""
    rng = random.Random(1000 + number)
    prompt = [rng.randrange(300, 2300) for _ in range(rng.randrange(500, 1500))]
    if number % 8 == 7:
        shared = random.Random(number // 64)
        prompt[:480] = [shared.randrange(300, 2300) for _ in range(480)]
    length = 12 + number * 7 % 24
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 0.8, "n": 2},
        {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    )
    body = {"prompt": prompt, "max_tokens": length, "seed": number, "ignore_eos": True, "return_token_ids": True}
    return body | kinds[number % len(kinds)] | {"stream": True, "stream_options": {"include_usage": True}}


def timed(number: int) -> dict[str, Any]:
    """The same of a stream whose first token is timed: its prompt is as long as every other's."""
    rng = random.Random(1000 + number)
    return asked(8 * number) | {"prompt": [rng.randrange(300, 2300) for _ in range(TIMED_TOKENS)]}


async def stream(http: httpx.AsyncClient, body: dict[str, Any], on_token: Callable[[], None]) -> Stream:
    said, began = Stream(), time.monotonic()
    said.token_ids = [[] for _ in range(body.get("n", 1))]
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            said.error = (await reply.aread()).decode()
            return said
        async for event in _events(reply):
            if "error" in event:
                said.error = str(event["error"])
                continue
            for choice in event["choices"]:
                said.first = said.first or time.monotonic() - began
                said.token_ids[choice["index"]] += choice.get("token_ids") or []
                on_token()
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            said.cached = details.get("cached_tokens", said.cached)
    return said


async def _events(reply: httpx.Response) -> Any:
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def streams(url: str, count: int, disturb: Callable[[Callable[[], float]], Awaitable[None]]) -> list[Stream]:
    """So many streams, `MOST` at once. `disturb` runs beside them, with a function for the share of tokens so far."""
    seen, seats = 0, asyncio.Semaphore(MOST)
    expected = sum(asked(number)["max_tokens"] * asked(number).get("n", 1) for number in range(count))

    def token() -> None:
        nonlocal seen
        seen += 1

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(300, connect=60), limits=limits) as http:

        async def one(number: int) -> Stream:
            async with seats:
                return await stream(http, asked(number), token)

        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        beside = asyncio.ensure_future(disturb(lambda: seen / expected))
        said = await asyncio.gather(*tasks)
        await beside
    return list(said)


def differences(expected: list[Stream], got: list[Stream]) -> list[str]:
    """A line for each stream that is not as it was."""
    return [
        f"stream {number}: {other.error or 'other tokens'}"
        for number, (one, other) in enumerate(zip(expected, got, strict=True))
        if other.error or one.token_ids != other.token_ids
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Apart:
    """A node of prompts behind a wire, a node of answers, and a front."""

    def __init__(
        self, stack: ExitStack, variant: tuple[str, ...], model: tuple[str, ...] = (), transport: KVTransport = "tcp"
    ) -> None:
        """`model`: the flags of another one than the embedded. `transport`: of blocks."""
        front = (*OF_FRONTS, *model[:2])
        variant += model
        if transport != "tcp":
            variant += ("--kv-transport", transport, "--kv-trust-network")
        self.is_on_wire = transport == "tcp"  # blocks are; otherwise questions and digests alone
        port = free_port()
        self.wire = stack.enter_context(KVWire(f"127.0.0.1:{port}"))
        where = ("--kv-listen", f"127.0.0.1:{port}", "--kv-address", self.wire.address)
        self.prompts = stack.enter_context(ServedNode(*OF_NODES, *variant, *where, "--role", "prefill", limits=PATIENT))
        own = ("--kv-listen", "127.0.0.1:0")
        self.answers = stack.enter_context(ServedNode(*OF_NODES, *variant, *own, "--role", "decode", limits=PATIENT))
        engines = f"{self.prompts.address},{self.answers.address}"
        self.front = stack.enter_context(Served("--engines", engines, *front, limits=PATIENT))
        self.ready()

    def ready(self) -> None:
        """Wait until both serve."""
        deadline = time.monotonic() + 120
        while sum(row["state"] == "ready" for row in replicas(self.front)) != 2:
            assert time.monotonic() < deadline, replicas(self.front)
            time.sleep(0.05)

    def passed(self, event: str) -> float:
        """Blocks of both nodes since the start."""
        return self.front.metric("quire_kv_transfer_blocks_total", event=event)

    def leased_for(self) -> float:
        """Seconds until nothing is leased any more."""
        began = time.monotonic()
        while self.front.metric("quire_kv_transfer_leased_blocks") and time.monotonic() < began + 2 * LEASE_SECONDS:
            time.sleep(0.1)
        return time.monotonic() - began


@contextmanager
def half_stopped(pid: int, seconds: float, period: float = 0.02) -> Iterator[Callable[[], Awaitable[None]]]:
    """A process that runs half of the time, for so many seconds."""

    async def slow() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(period)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(period)

    try:
        yield slow
    finally:
        os.kill(pid, signal.SIGCONT)


class Trouble:
    """What happens, one after the other, each under streams of its own."""

    def __init__(self, apart: Apart) -> None:
        self._apart = apart

    async def nothing(self, share: Callable[[], float]) -> None:
        await reached(share, 0.1)

    async def prompts_killed(self, share: Callable[[], float]) -> None:
        await reached(share, 0.2)
        self._apart.prompts.process.kill()
        self._apart.prompts.process.wait()
        await asyncio.to_thread(self._apart.prompts.start)

    async def answers_killed(self, share: Callable[[], float]) -> None:
        await reached(share, 0.2)
        self._apart.answers.process.kill()
        self._apart.answers.process.wait()
        await asyncio.to_thread(self._apart.answers.start)

    async def byte_flipped(self, share: Callable[[], float]) -> None:
        for goal in (0.1, 0.2, 0.3):
            await reached(share, goal)
            self._apart.wire.flip_at = self._apart.wire.num_bytes + 100_000

    async def slow_wire(self, share: Callable[[], float]) -> None:
        self._apart.wire.bytes_per_second = SLOW_WIRE
        await reached(share, 0.7)
        self._apart.wire.bytes_per_second = 0.0

    async def slow_prompts(self, share: Callable[[], float]) -> None:
        (row,) = (
            each for each in await asyncio.to_thread(replicas, self._apart.front)
            if each["name"] == self._apart.prompts.address
        )  # fmt: skip
        with half_stopped(row["pid"], 8.0) as slow:
            await slow()
        await reached(share, 0.1)

    @property
    def each(self) -> tuple[Callable[[Callable[[], float]], Awaitable[None]], ...]:
        anyhow = (self.nothing, self.prompts_killed, self.answers_killed, self.slow_prompts)
        if not self._apart.is_on_wire:
            return anyhow
        # The slow wire last, since nothing is fetched for a while then.
        return (*anyhow, self.byte_flipped, self.slow_wire)


async def _nothing(_: Callable[[], float]) -> None:
    pass


def first_tokens(apart: Apart, first: int, count: int = 12) -> list[float]:
    """Seconds to the first token of so many streams, one after the other, with prompts that nobody has computed."""

    async def each() -> list[float]:
        async with httpx.AsyncClient(base_url=apart.front.url, timeout=60) as http:
            return [(await stream(http, timed(number), lambda: None)).first for number in range(first, first + count)]

    return asyncio.run(each())


def bounds(apart: Apart) -> list[bool]:
    """By how much first tokens are later than where the node of answers computes the prompt, one stream at a time.

    What that takes is measured anew before each, since others may use the machine.
    """
    name, good, first = apart.prompts.address, list[bool](), 1000
    drain = f"{apart.front.url}/admin/replicas/{name}/drain"

    def seconds() -> float:
        nonlocal first
        first += 100
        return statistics.median(first_tokens(apart, first))

    def tell(what: str, begin: Callable[[], None]) -> None:
        httpx.post(drain, timeout=30).raise_for_status()
        own = seconds()
        httpx.delete(drain, timeout=30).raise_for_status()
        begin()
        most, found = LATER * own + LATE_SECONDS, seconds()
        good.append(
            told(f"first token, {what}, median seconds", f"at most {most:.3f} (own prefill {own:.3f})",
                 f"{found:.3f}, {found / own:.2f}x", holds=found <= most)
        )  # fmt: skip

    def nothing() -> None:
        pass

    def stop() -> None:
        (row,) = (each for each in replicas(apart.front) if each["name"] == name)
        stopped.extend([apart.prompts.process.pid, row["pid"]])
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    def slow() -> None:
        apart.wire.bytes_per_second = SLOW_WIRE

    came, stopped = apart.passed("received"), list[int]()
    tell("prompts on their node", nothing)
    came = apart.passed("received") - came
    # Where computing a chunk takes little more than beginning a step, a node by itself is faster, and none comes.
    told("blocks that came for them", "any number", int(came), holds=True)
    tell("node of prompts stopped", stop)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    apart.ready()
    if apart.is_on_wire:
        tell("slow wire", slow)
        apart.wire.bytes_per_second = 0.0
    apart.answers.stop()  # its engine would go on to take the wire for slow
    apart.answers.start()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m replicas.prompts", description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="for each event")
    parser.add_argument("--model", help="time first tokens of this one, with nodes of 512 MiB, and nothing else")
    parser.add_argument(
        "--transport",
        choices=get_args(KVTransport),
        default="tcp",
        help="of blocks; what only the wire does is left out",
    )
    parser.add_argument("--events", default="", metavar="NAME,...", help="of these alone, without the timed streams")
    given = parser.parse_args()
    chosen = given.events.split(",") if given.events else []
    if given.model:
        with ExitStack() as stack:
            more = ("--model", given.model, "--kv-memory", "512MiB", "--max-model-len", "2048")
            return 0 if all(bounds(Apart(stack, (), more, given.transport))) else 1
    with Served(*FLAGS[2:]) as alone:
        variant = cpu_variant(alone)
        expected = asyncio.run(streams(alone.url, given.streams, _nothing))
    good: list[bool] = []
    received = 0.0
    with ExitStack() as stack:
        apart = Apart(stack, variant, transport=given.transport)
        trouble = Trouble(apart)
        if not chosen:
            good += bounds(apart)
        for event in [each for each in trouble.each if not chosen or each.__name__ in chosen]:
            apart.ready()
            before, missed = apart.passed("received"), apart.passed("missed")
            got = asyncio.run(streams(apart.front.url, given.streams, event))
            broken = differences(expected, got)
            for line in broken[:10]:
                print(line)
            came, lost = apart.passed("received") - before, apart.passed("missed") - missed
            received += came
            first = [statistics.median(each.first for each in said) for said in (expected, got)]
            share = sum(each.cached for each in got) / sum(len(asked(number)["prompt"]) for number in range(len(got)))
            print(
                f"{event.__name__}: {came:.0f} blocks came, {lost:.0f} did not; {share:.0%} of the prompts' tokens were"
                f" not computed where they were answered; median seconds to the first token {first[1]:.3f}, with one"
                f" engine {first[0]:.3f}",
                flush=True,
            )
            good.append(
                told(f"{event.__name__}: the tokens of one engine", given.streams, len(got) - len(broken),
                     holds=not broken)
            )  # fmt: skip
            leased = apart.leased_for()
            good.append(
                told(f"{event.__name__}: nothing leased, seconds after", f"at most {LEASE_SECONDS:g}", f"{leased:.1f}",
                     holds=leased <= LEASE_SECONDS)
            )  # fmt: skip
        good.append(told("blocks that came from the node of prompts", "more than 0", int(received), holds=received > 0))
        if apart.is_on_wire and (not chosen or "byte_flipped" in chosen):
            refused = apart.passed("refused")
            good.append(told("damaged blocks refused", "1 or more", int(refused), holds=refused >= 1))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
