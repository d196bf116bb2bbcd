"""Three models through a budget for two, held against each alone: `make models-test`.

Sixteen mixed clients for ten minutes; streams over a swap and back; `kill -9` of an engine at twelve phases. Promises:
expected and got are printed for each promise, with exit code 1 where one is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from dataclasses import dataclass, field

import httpx

from e2e.served import Served
from replicas.streams import Said, client, stream
from several.phases import PHASES, STREAMS, Expected, expected_of, run_phase
from several.server import NAMES, order, rows, three_models, untruths

KINDS = tuple(range(16))  # of streams, each kind twice
RESTARTS = ("--set", "max_engine_restarts=1000")  # kills during a start count as failures of the engine
SEED = 20


def told(what: str, expected: object, got: object, *, holds: bool) -> bool:
    print(f"{'as promised' if holds else 'BROKEN':<12} {what:<46} expected {expected}, got {got}", flush=True)
    return holds


@dataclass(slots=True)
class Traffic:
    """What clients got."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    first_seconds: list[float] = field(default_factory=list)  # to a stream's first chunk


async def one_client(http: httpx.AsyncClient, number: int, until: float, expected: Expected, traffic: Traffic) -> None:
    """Streams and whole replies of random models, one after the other."""
    chance, kinds = random.Random(SEED + number), sorted({kind for _, kind in expected})
    while time.monotonic() < until:
        name, kind = chance.choice(NAMES), chance.choice(kinds)
        if chance.random() < 0.25:
            body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
            path, body = chance.choice((("/v1/chat/completions", body), ("/v1/messages", body)))
            reply = await http.post(path, json=body)
            traffic.statuses[reply.status_code] = traffic.statuses.get(reply.status_code, 0) + 1
            if reply.status_code == 200 and reply.json()["model"] != name:
                traffic.wrong.append(f"{path}: the model {reply.json()['model']} has answered for {name}")
        else:
            began = time.monotonic()
            said = await stream(http, kind, lambda: None, name, tries=1)
            status = said.errors[0][0] if said.errors else 200
            traffic.statuses[status] = traffic.statuses.get(status, 0) + 1
            if said != expected[name, kind] or not said.is_done:
                traffic.wrong.append(f"stream {kind} of {name}: {said.errors or 'other tokens'}")
            if said.heard:
                traffic.first_seconds.append(said.heard[0] - began)
        traffic.answers += 1
        await asyncio.sleep(chance.expovariate(5.0))


async def clients(server: Served, count: int, seconds: float, expected: Expected) -> tuple[Traffic, list[str]]:
    """So many clients at once, and what the server said of itself meanwhile that is not so."""
    traffic, until, false = Traffic(), time.monotonic() + seconds, []
    async with client(server.url) as http:
        tasks = [asyncio.create_task(one_client(http, each, until, expected, traffic)) for each in range(count)]
        while time.monotonic() < until:
            await asyncio.sleep(min(2.0, seconds / 4))
            reply = (await http.get("/admin/models")).json()
            if reply["memory_bytes"] > reply["budget_bytes"]:
                false.append(f"{reply['memory_bytes']} bytes taken of {reply['budget_bytes']}")
            if (await http.get("/health/ready")).status_code != 200:
                false.append("/health/ready fails")
        await asyncio.gather(*tasks)
    return traffic, false


async def swap_and_back(server: Served, expected: Expected) -> tuple[int, int]:
    """Eight streams of one model that make way for two others, and go on: how many are as alone, and how many were
    held in their middle.
    """
    name, numbers = NAMES[0], KINDS[:8]
    chunks = dict.fromkeys(numbers, 0)

    def count(number: int) -> None:
        chunks[number] += 1

    await asyncio.to_thread(order, server, "load", name)
    async with client(server.url) as http:
        tasks = [asyncio.create_task(stream(http, each, lambda each=each: count(each), name)) for each in numbers]
        while sum(chunks.values()) < 8 * len(numbers):  # noqa: ASYNC110 - it is looked at, not told
            await asyncio.sleep(0.002)
        await asyncio.to_thread(order, server, "unload", name)
        seen = None  # what was on its way when the engine ended arrives, until nothing has for two seconds
        while seen != (now := (sum(chunks.values()), sum(task.done() for task in tasks))):
            seen = now
            await asyncio.wait(tasks, timeout=2.0)
        held = sum(not task.done() for task in tasks)
        await asyncio.gather(*(stream(http, 0, lambda: None, other) for other in NAMES[1:]))
        assert sum(not task.done() for task in tasks) == held, "no stream ends without an engine"
        await asyncio.to_thread(order, server, "load", name)
        said: list[Said] = list(await asyncio.gather(*tasks))
    return sum(each == expected[name, number] for number, each in zip(numbers, said, strict=True)), held


def loads(server: Served) -> int:
    text = httpx.get(server.url + "/metrics", timeout=60).text
    return int(
        sum(float(found) for found in re.findall(r"^quire_model_loads_total\{[^}]*\} (\S+)$", text, re.MULTILINE))
    )


def trial(minutes: float, count: int) -> list[bool]:
    with three_models(turn=5.0) as server:
        expected = asyncio.run(expected_of(server, KINDS))
        same, held = asyncio.run(swap_and_back(server, expected))
        kept = [
            told("streams that are as alone over a swap and back", 8, same, holds=same == 8),
            told("of them held in their middle", "1 or more", held, holds=held > 0),
        ]
        before = loads(server)
        traffic, false = asyncio.run(clients(server, count, minutes * 60, expected))
        swaps = loads(server) - before
        false += untruths(server)
        firsts = sorted(traffic.first_seconds) or [float("nan")]
        print(f"{traffic.answers} answers, {swaps} loads, first chunk p50 {firsts[len(firsts) // 2]:.2f} s,", end=" ")
        print(f"p95 {firsts[len(firsts) * 95 // 100]:.2f} s, longest {firsts[-1]:.2f} s")
        for line in [*traffic.wrong, *false][:20]:
            print(f"  {line}")
        return [
            *kept,
            told("statuses", {200}, traffic.statuses, holds=set(traffic.statuses) == {200}),
            told("answers that are not as alone", 0, len(traffic.wrong), holds=not traffic.wrong),
            told("loads, since three models share room for two", "3 or more", swaps, holds=swaps >= 3),
            told("untruths of health, states and memory", 0, len(false), holds=not false),
        ]


def kills() -> list[bool]:
    with three_models(*RESTARTS, turn=1.0) as server:
        expected = asyncio.run(expected_of(server, STREAMS))
        kept = []
        for number, phase in enumerate(PHASES, 1):
            wrong = asyncio.run(run_phase(server, phase, expected))
            kept.append(told(f"kill -9, phase {number} of {len(PHASES)}: {phase}", [], wrong, holds=not wrong))
        print([(each["model"], each["state"], each["why"]) for each in rows(server)])
        return kept


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m several", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--only", choices=("clients", "kills"))
    given = parser.parse_args()
    kept = [] if given.only == "kills" else trial(given.minutes, given.clients)
    kept += [] if given.only == "clients" else kills()
    print("as promised" if all(kept) else "BROKEN")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
