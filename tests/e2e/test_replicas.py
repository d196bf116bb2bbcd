"""`quire serve --replicas 2`: engines are killed, stopped and drained under mixed streams, and no client sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from e2e.served import Served
from replicas.__main__ import FLAGS, cpu_variant, kill_engines, replicas
from replicas.streams import Said, differences, reached, streams

pytestmark = pytest.mark.e2e

NUM_STREAMS = 56


@pytest.fixture(scope="module")
def alone() -> tuple[list[Said], tuple[str, ...]]:
    """What the streams are with one engine, and the flags for the same bits."""
    with Served(*FLAGS) as server:
        return asyncio.run(streams(server.url, NUM_STREAMS)), cpu_variant(server)


def with_two(alone: tuple[list[Said], tuple[str, ...]], silence: str) -> Served:
    return Served(*FLAGS, *alone[1], "--replicas", "2", limits=f"replica_silence={silence}")


@pytest.fixture(scope="module")
def server(alone: tuple[list[Said], tuple[str, ...]]) -> Iterator[Served]:
    """A busy host's pauses are not taken for a loss."""
    with with_two(alone, "30") as started:
        yield started


def restarted(server: Served, times: int) -> None:
    """Wait until engines have been replaced so often, or more often, and all are there."""
    deadline = time.monotonic() + 300
    while server.metric("quire_replica_up") < 2 or server.metric("quire_engine_restarts_total") < times:
        assert time.monotonic() < deadline, replicas(server)
        time.sleep(0.05)


def test_a_stopped_engine_is_replaced(alone: Any) -> None:
    """A busy host may hold an engine up for as long as one that is stopped, so that more are replaced."""
    with with_two(alone, "5") as server:

        async def stop(share: Callable[[], float]) -> None:
            await reached(share, 0.3)
            os.kill(replicas(server)[0]["pid"], signal.SIGSTOP)

        got = asyncio.run(streams(server.url, NUM_STREAMS, stop))
        assert not differences(alone[0], got)
        restarted(server, 1)
        assert "no sign of life" in server.log()


def test_a_kill_of_an_engine_is_not_seen_by_any_client(server: Served, alone: Any) -> None:
    killed: list[float] = []
    got = asyncio.run(streams(server.url, NUM_STREAMS, kill_engines(server, 1, killed)))
    assert not differences(alone[0], got)
    assert len(killed) == 1
    assert server.metric("quire_streams_moved_total") > 0
    restarted(server, 1)
    assert server.metric("quire_engine_restarts_total") == 1
    decided = server.metric("quire_route_decisions_total")
    assert decided == NUM_STREAMS + server.metric("quire_streams_moved_total")
    server.wait_idle()


def test_a_rolling_drain_ends_nothing_and_a_server_with_one_replica_is_ready(server: Served, alone: Any) -> None:
    async def drain(share: Callable[[], float]) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            for turn in range(4):
                await reached(share, (turn + 1) / 6)
                path = f"/admin/replicas/{turn % 2}/drain"
                row = (await http.post(path)).json()
                assert (row["draining"], row["streams"]) == (True, 0)
                assert (await http.get("/health/ready")).status_code == 200
                assert (await http.delete(path)).json()["draining"] is False

    names = "quire_streams_moved_total", "quire_engine_restarts_total"
    moved, restarts = map(server.metric, names)
    got = asyncio.run(streams(server.url, NUM_STREAMS, drain))
    assert not differences(alone[0], got)
    assert server.metric(names[0]) > moved
    assert server.metric(names[1]) == restarts


def test_health_metrics_and_questions_tell_of_both(server: Served) -> None:
    rows = replicas(server)
    assert [row["name"] for row in rows] == ["0", "1"]
    assert len({row["numerics"] for row in rows}) == 1
    assert server.metric("quire_replica_up") == 2
    assert server.metric("quire_kv_pool_blocks") == server.metric("quire_kv_blocks")
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for number in range(4):
            body = {"prompt": f"Question {number}", "max_tokens": 4}
            reply = http.post("/v1/completions", json=body, headers={"x-request-id": f"q{number}"})
            assert reply.status_code == 200
        explained = [http.get(f"/debug/requests/q{number}").json()["requests"][0] for number in range(4)]
        assert {one["client_id"] for one in explained} == {f"q{number}" for number in range(4)}
        assert all(one["replica"] in {"0", "1"} and one["moves"] == 0 for one in explained)
        assert len(http.get("/debug/requests").json()["ended"]) >= 4
        assert http.get("/debug/kv/audit", params={"replica": "1"}).json()["clean"] is True
        assert http.get("/debug/kv", params={"replica": "7"}).status_code == 404
        assert http.post("/admin/reset-prefix-cache").status_code == 200
        assert http.post("/admin/replicas/5/drain").status_code == 404
        os.kill(rows[0]["pid"], signal.SIGKILL)
        assert http.get("/health/ready").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "Still here", "max_tokens": 4}).status_code == 200
