"""Conversations on four replicas with small pools, by predicted first token and in turn: `make replica-test`.

Promises: what the caches found and the predicted beside the seen time to first token are printed beside what is
promised of them, with exit code 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
from dataclasses import dataclass

import httpx

from e2e.served import Served
from replicas.__main__ import FLAGS, told

POLICIES = ("predicted_ttft", "round_robin")
HITS = 1.8  # times those of round robin
NEAR = 0.25  # of the seen TTFT at p50, by which the predicted one may differ
SESSIONS, FIRST, TURN, LONGEST = 40, 192, 96, 960  # conversations; tokens of a first prompt, of a turn, of the last one
POOL = "48MiB"  # of all four, 16,384 tokens: three quarters of what the conversations hold together


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of the load."""

    at: float  # seconds from the start
    prompt: tuple[int, ...]


def load(count: int, rate: float) -> list[Turn]:
    """Conversations that grow by a turn each time and begin anew when they are long; arrivals as Poisson's."""
    rng, at, turns = random.Random(7), 0.0, []
    system = tuple(rng.randrange(300, 2000) for _ in range(64))
    talks = [system] * SESSIONS
    for _ in range(count):
        at += rng.expovariate(rate)
        which = rng.randrange(SESSIONS)
        grown = len(talks[which]) + (TURN if len(talks[which]) > len(system) else FIRST)
        kept = talks[which] if grown <= LONGEST else system
        more = (grown if grown <= LONGEST else len(system) + FIRST) - len(kept)
        talks[which] = (*kept, *[rng.randrange(300, 2000) for _ in range(more)])
        turns.append(Turn(at=at, prompt=talks[which]))
    return turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a server tells of a load that it has served."""

    hits: float  # share of prompt tokens that were cached
    predicted: float  # TTFT at p50, seconds
    seen: float
    failed: int


def serve(policy: str, turns: list[Turn]) -> Seen:
    flags = (*FLAGS, "--replicas", "4", "--set", f"route_policy={policy}", "--kv-memory", POOL)
    with Served(*flags) as server:
        failed = asyncio.run(_send(server.url, turns))
        text = httpx.get(server.url + "/metrics", timeout=30).text
        cached, asked = (server.metric(f"quire_prompt_tokens{which}_total") for which in ("_cached", ""))
    medians = [_median(text, f"quire_route_{name}_ttft_seconds") for name in ("predicted", "seen")]
    return Seen(hits=cached / asked, predicted=medians[0], seen=medians[1], failed=failed)


async def _send(url: str, turns: list[Turn]) -> int:
    """Send each request at its time. Returns how many were not answered."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        started = asyncio.get_running_loop().time()

        async def one(turn: Turn) -> bool:
            await asyncio.sleep(started + turn.at - asyncio.get_running_loop().time())
            body = {"prompt": list(turn.prompt), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            return (await http.post("/v1/completions", json=body)).status_code == 200

        return (await asyncio.gather(*map(one, turns))).count(False)


def _median(text: str, name: str) -> float:
    """Of a histogram over all replicas, evenly within its bucket, seconds; not a number where it has no values."""
    counts: dict[float, float] = {}
    for bound, count in re.findall(rf'^{name}_bucket\{{[^}}]*le="([^"]+)"[^}}]*\}} (\S+)$', text, re.MULTILINE):
        counts[float(bound)] = counts.get(float(bound), 0.0) + float(count)
    half, low, below = counts.get(float("inf"), 0.0) / 2, 0.0, 0.0
    for bound in sorted(counts):
        if half and counts[bound] >= half:
            return low + (bound - low) * (half - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m replicas.routing", description=__doc__)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    given = parser.parse_args()
    turns = load(given.requests, given.rate)
    ours, turn = (serve(policy, turns) for policy in POLICIES)
    for policy, one in zip(POLICIES, (ours, turn), strict=True):
        print(
            f"{policy}: {one.hits:.1%} of the prompts cached, TTFT p50 predicted {one.predicted * 1e3:.0f} ms, seen"
            f" {one.seen * 1e3:.0f} ms"
        )
    good = [
        told("requests not answered", 0, ours.failed + turn.failed, holds=not ours.failed + turn.failed),
        told(
            "cached, over round robin",
            f"at least {HITS:g}",
            f"{ours.hits / turn.hits:.2f}",
            holds=ours.hits >= HITS * turn.hits,
        ),
        told(
            "TTFT at p50, predicted over seen",
            f"{1 - NEAR:g} to {1 + NEAR:g}",
            f"{ours.predicted / ours.seen:.2f}",
            holds=abs(ours.predicted / ours.seen - 1) <= NEAR,
        ),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
