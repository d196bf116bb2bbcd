"""A thousand mixed streams on two replicas under ten kills, held against one engine alone: `make replica-test`.

Promises: expected and got are printed for each promise, with exit code 1 where one is broken."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

from e2e.served import Served
from replicas.streams import Said, differences, reached, streams

FLAGS = ("--max-model-len", "1024", "--max-num-queued-reqs", "4096", "--max-connections", "4096")
FLAGS += ("--disable-access-log",)
NEXT_TOKEN_SECONDS = 3.0  # p95 of a moved stream


def replicas(server: Served) -> list[dict[str, Any]]:
    return list(httpx.get(server.url + "/admin/replicas", timeout=30).json()["replicas"])


def cpu_variant(server: Served) -> tuple[str, ...]:
    """The flags with which another server computes the same bits."""
    found = re.search(r'quire_model_info\{[^}]*cpu_variant="(\w+)"', httpx.get(server.url + "/metrics").text)
    return ("--set", f"cpu_variant={found[1]}") if found else ()


def quantile(server: Served, name: str, share: float) -> float:
    """The upper end of the bucket with this share of a histogram's values; not a number where it has none."""
    text = httpx.get(server.url + "/metrics", timeout=30).text
    found = re.findall(rf'^{name}_bucket\{{[^}}]*le="([^"]+)"[^}}]*\}} (\S+)$', text, re.MULTILINE)
    counts = [(float(bound), float(count)) for bound, count in found]
    total = counts[-1][1] if counts else 0.0
    return next((bound for bound, count in counts if total and count >= share * total), math.nan)


def kill_engines(server: Served, kills: int, killed: list[float]) -> Callable[[Callable[[], float]], Any]:
    """Kill one engine and then the other, each when both are there, at even shares of what comes before the last fifth:
    near the end nothing would be left to move.
    """

    async def disturb(share: Callable[[], float]) -> None:
        for kill in range(kills):
            await reached(share, 0.8 * (kill + 1) / (kills + 1))
            while True:
                rows = await asyncio.to_thread(replicas, server)
                if all(row["state"] == "ready" and row["pid"] for row in rows):
                    break
                await asyncio.sleep(0.05)
            os.kill(rows[kill % len(rows)]["pid"], signal.SIGKILL)
            killed.append(time.monotonic())

    return disturb


def told(what: str, expected: object, got: object, *, holds: bool) -> bool:
    print(f"{'as promised' if holds else 'BROKEN':<12} {what:<46} expected {expected}, got {got}", flush=True)
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m replicas", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    with Served(*FLAGS) as alone:
        variant = cpu_variant(alone)
        expected: list[Said] = asyncio.run(streams(alone.url, given.streams))
    killed: list[float] = []
    with Served(*FLAGS, *variant, "--replicas", "2") as server:
        got = asyncio.run(streams(server.url, given.streams, kill_engines(server, given.kills, killed)))
        broken = differences(expected, got)
        moved, restarts = server.metric("quire_streams_moved_total"), server.metric("quire_engine_restarts_total")
        next_token = quantile(server, "quire_move_seconds", 0.95)
        server.wait_idle(30)
    for line in broken[:20]:
        print(line)
    errors = sum(len(said.errors) for said in got)
    good = [
        told("streams with all their text", given.streams, given.streams - len(broken), holds=not broken),
        told("errors", 0, errors, holds=errors == 0),
        told("engines killed", given.kills, len(killed), holds=len(killed) == given.kills),
        told("engines restarted", len(killed), int(restarts), holds=restarts >= len(killed)),
        told("streams moved", "more than 0", int(moved), holds=moved > 0),
        told(
            "next token of a moved stream, p95, seconds",
            f"at most {NEXT_TOKEN_SECONDS:g}",
            f"at most {next_token:g}",
            holds=next_token <= NEXT_TOKEN_SECONDS,
        ),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
