"""The time of one routing decision, and the memory of a full prefix index.

    python -m benchmarks.route_decision [--replicas 100] [--decisions 20000]

Every replica's index is full; prompts have 12,000 tokens in blocks of 16 and share their beginnings with what some or
all replicas hold. Exits with 1 when a decision takes longer than 200 us at p99, or the index more than 256 MB.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

from quire_engine.contract.block_hashes import MOST_ROUTED
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import PrefixChanges
from quire_engine.cost_model import CostModel
from quire_engine.routing.index import MOST_BLOCKS, PrefixIndex
from quire_engine.routing.policy import route_policy
from quire_engine.routing.views import ReplicaView, RouteRequest

LIMIT_US = 200.0
LIMIT_MB = 256.0
PROMPT_TOKENS = 12_000
_COST = CostModel(step=0.012, row=6e-5, context=2e-8, prompt=((1, 0.0125), (512, 0.048), (4096, 0.345)))


def full_index(names: Sequence[str], rng: random.Random, shared: Sequence[int]) -> PrefixIndex:
    """Every replica holds the shared blocks and chains of its own, as many as it may."""
    index = PrefixIndex()
    for name in names:
        index.add(name)
        depths = [at % MOST_ROUTED for at in range(MOST_BLOCKS)]
        blocks = [*shared, *[rng.getrandbits(64) for _ in range(MOST_BLOCKS - len(shared))]]
        index.replace(name, PrefixChanges(number=1, registered=tuple(blocks), depths=tuple(depths)))
    return index


def views(names: Sequence[str], rng: random.Random) -> list[ReplicaView]:
    limits = SchedulerLimits(max_num_batched_tokens=2048, prefill_chunk=2048)
    base = ReplicaView(name="", cohort="one", state="ready", cost=_COST, limits=limits, blocks_total=65_536)
    return [
        replace(
            base,
            name=name,
            prompt_tokens_ahead=rng.randrange(20_000),
            requests=rng.randrange(64),
            decodes=rng.randrange(64),
            context=rng.randrange(100_000),
            blocks_free=rng.randrange(2_000),
            step_ends_in=rng.random() * 0.05,
        )
        for name in names
    ]


def decisions(
    index: PrefixIndex, names: Sequence[str], count: int, rng: random.Random, shared: Sequence[int]
) -> list[tuple[float, float]]:
    """Seconds of each decision and of the note of what was sent, for prompts that share a part of their blocks."""
    policy, seen, took = route_policy("predicted_ttft"), views(names, rng), []
    for number in range(count):
        common = rng.choice((0, 32, MOST_ROUTED // 2, MOST_ROUTED))
        own = [rng.getrandbits(64) for _ in range(MOST_ROUTED - common)]
        blocks = (*shared[:common], *own)
        request = RouteRequest(
            request_id=str(number), prompt_tokens=PROMPT_TOKENS, blocks=blocks, session=str(number % 997)
        )
        began = time.perf_counter()
        route = policy.choose(request, seen, index, 0.0)
        chosen = time.perf_counter()
        index.sent(route.name, request.request_id, blocks)
        took.append((chosen - began, time.perf_counter() - chosen))
        if number >= 64:
            index.answered(str(number - 64))
        at = names.index(route.name)
        seen[at] = replace(seen[at], prompt_tokens_ahead=rng.randrange(20_000))
    return took


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 in microseconds."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] * 1e6, ordered[int(0.99 * (len(ordered) - 1))] * 1e6


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--decisions", type=int, default=20_000)
    given = parser.parse_args(argv)
    rng = random.Random(0)
    names = [f"replica-{number}" for number in range(given.replicas)]
    shared = [rng.getrandbits(64) for _ in range(MOST_ROUTED)]
    tracemalloc.start()
    index = full_index(names, rng, shared)
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    took = decisions(index, names, given.decisions, rng, shared)
    (p50, p99), (note50, note99) = (_percentiles([one[part] for one in took]) for part in (0, 1))
    print(f"{given.replicas} replicas, {len(index):,} blocks in the index, {megabytes:.0f} MB (limit {LIMIT_MB:g})")
    print(f"decision: p50 {p50:.0f} us, p99 {p99:.0f} us (limit {LIMIT_US:g})")
    print(f"note of what was sent: p50 {note50:.0f} us, p99 {note99:.0f} us")
    return int(p99 > LIMIT_US or megabytes > LIMIT_MB)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
