"""`quire serve --tensor-parallel-size N`: the streams of one process, also when a rank is killed under them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from e2e.served import Served
from replicas.__main__ import FLAGS, cpu_variant, replicas
from replicas.streams import Said, differences, reached, streams
from support.processes import children_running, lives

pytestmark = pytest.mark.e2e

RANK = "quire_engine.process.rank"
NUM_STREAMS = 56


@pytest.fixture(scope="module")
def alone() -> tuple[list[Said], tuple[str, ...]]:
    """What the streams are with one rank, and the flags for the same bits."""
    with Served(*FLAGS) as server:
        return asyncio.run(streams(server.url, NUM_STREAMS)), cpu_variant(server)


def ranks_of(server: Served) -> list[int]:
    """The ranks beside the engine process that runs now."""
    return [child.pid for child in children_running(server.engine().pid, RANK)]


def test_a_kill_of_a_rank_is_not_seen_by_any_client(alone: Any) -> None:
    with Served(*FLAGS, *alone[1], "-tp", "2", "--num-threads", "2") as server:
        assert not differences(alone[0], asyncio.run(streams(server.url, NUM_STREAMS)))
        (first,) = ranks_of(server)

        async def kill(share: Callable[[], float]) -> None:
            await reached(share, 0.4)
            os.kill(first, signal.SIGKILL)

        assert not differences(alone[0], asyncio.run(streams(server.url, NUM_STREAMS, kill)))
        assert server.metric("quire_engine_restarts_total") == 1
        (second,) = ranks_of(server)
        assert second != first
    for pid in (first, second):
        assert not lives(pid), "a rank is left behind"


@pytest.mark.matrix  # in `make rank-test`; four ranks, and two with int4: tests/model/test_ranks.py
def test_four_ranks_and_their_weights_in_int4(alone: Any) -> None:
    with Served(*FLAGS, *alone[1], "--quantization", "int4") as server:
        expected = asyncio.run(streams(server.url, 16))
    with Served(*FLAGS, *alone[1], "--quantization", "int4", "-tp", "4", "--num-threads", "4") as server:
        assert len(ranks_of(server)) == 3
        assert not differences(expected, asyncio.run(streams(server.url, 16)))
        assert "4 ranks of 1 thread" in server.log()


@pytest.mark.matrix  # in `make rank-test`; a killed engine moves its streams as this one does: test_replicas.py
def test_a_kill_of_one_replica_s_rank_moves_its_streams(alone: Any) -> None:
    beside = ("--replicas", "2", "-tp", "2", "--num-threads", "4")
    with Served(*FLAGS, *alone[1], *beside) as server:
        engines = [row["pid"] for row in replicas(server)]
        (rank,) = (child.pid for child in children_running(engines[0], RANK))

        async def kill(share: Callable[[], float]) -> None:
            await reached(share, 0.4)
            os.kill(rank, signal.SIGKILL)

        assert not differences(alone[0], asyncio.run(streams(server.url, NUM_STREAMS, kill)))
        assert server.metric("quire_streams_moved_total") > 0
