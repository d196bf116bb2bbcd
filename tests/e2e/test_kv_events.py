"""KV events of real servers: whoever follows them has the blocks that `/debug/kv` lists, of each engine."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from e2e.served import Served
from e2e.served_node import ServedNode
from support.kv_subscriber import Subscriber

pytestmark = pytest.mark.e2e

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def config(tmp_path: Path, **fields: Any) -> tuple[str, ...]:
    ends = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    given = {"enable_kv_cache_events": True, **ends, **fields}
    return ("--kv-events-config", msgspec.json.encode(given).decode())


def follow(tmp_path: Path, rank: int = 0) -> Subscriber:
    """A subscriber that comes before the first request, or after it: what it has missed is replayed."""
    end = f"_dp{rank}" if rank else ""
    made = Subscriber(f"ipc://{tmp_path}/pub{end}", f"ipc://{tmp_path}/replay{end}")
    made.replay(0)
    return made


def complete(server: Served, number: int, **fields: Any) -> None:
    prompt = " ".join(WORDS[number % 3 :] + [WORDS[(number * index) % 12] for index in range(40)])
    body = {"model": "quire-demo", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0, **fields}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text


def agrees(server: Served, subscriber: Subscriber, replica: str = "") -> int:
    """Wait until both have the same blocks; returns how many."""
    deadline = time.monotonic() + 300
    while True:
        subscriber.drained(50)
        query = {"names": "true", **({"replica": replica} if replica else {})}
        reply = httpx.get(server.url + "/debug/kv", params=query, timeout=120)
        listed = reply.json()["matchable"] if reply.status_code == 200 else [[-1]]  # it restarts
        held = {(group, name) for group, names in enumerate(listed) for name in names}
        if subscriber.held == held:
            return len(held)
        assert time.monotonic() < deadline, (reply.text[:200], len(subscriber.held - held), len(held - subscriber.held))


def test_the_events_of_each_replica_are_its_cache(tmp_path: Path) -> None:
    flags = ("--replicas", "2", "--kv-memory", "2MiB", "--max-model-len", "256", "--set", "route_policy=round_robin")
    with Served(*flags, *config(tmp_path, buffer_steps=10)) as server, ExitStack() as stack:
        early = [stack.enter_context(follow(tmp_path, rank)) for rank in range(2)]
        for number in range(24):
            complete(server, number, **({"cache_salt": "mine"} if number % 4 == 0 else {}))
        counts = [agrees(server, each, str(rank)) for rank, each in enumerate(early)]
        assert min(counts) > 10
        assert server.metric("quire_kv_evictions_total") > 0
        assert any(["mine"] in (event["extra_keys"] or []) for each in early for event in each.stored)
        late = stack.enter_context(follow(tmp_path, 1))
        assert late.num_cleared == 1, "batches that are not kept any more are one dump"
        assert agrees(server, late, "1") == counts[1]

        pid = httpx.get(server.url + "/admin/replicas").json()["replicas"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        early[0].until(set())
        httpx.post(server.url + "/admin/reset-prefix-cache").raise_for_status()
        complete(server, 1)
        complete(server, 2)
        for rank, each in enumerate(early):
            agrees(server, each, str(rank))


def test_a_node_publishes_what_its_fronts_ask_of_it(tmp_path: Path) -> None:
    with (
        ServedNode("--kv-memory", "8MiB", *config(tmp_path)) as node,
        Served("--engines", node.address) as server,
        follow(tmp_path) as subscriber,
    ):
        for number in range(4):
            complete(server, number)
        assert agrees(server, subscriber) > 10
