"""Nodes with invented tokens: streams survive the loss of a node, of a connection, of one direction, of an engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from quire_engine.contract.errors import ConfigError
from quire_server.engine.nodes.addresses import Source, read_addresses
from quire_server.engine.supervisor import EngineState
from support.nodes import Cluster, cluster, front, ready, served_node
from support.plans import changed
from support.supervising import expected, request, run

LENGTH = 200


def submit(them: Cluster, count: int = 8, tokens: int = LENGTH) -> list[str]:
    names = [f"r{i}" for i in range(count)]
    for i, name in enumerate(names):
        them.set.submit(request(name, (i, i + 1), tokens=tokens, n=1 + i % 2))
    return names


async def all_have(them: Cluster, names: Sequence[str], tokens: int) -> None:
    await them.client.until(lambda: all(len(them.client.tokens.get((n, 0), ())) >= tokens for n in names))


async def all_end_as_with_one_engine(them: Cluster, names: Sequence[str], tokens: int = LENGTH) -> None:
    choices = {(name, choice) for i, name in enumerate(names) for choice in range(1 + i % 2)}
    await them.client.until(lambda: them.client.ends.keys() >= choices)
    for i, name in enumerate(names):
        for choice in range(1 + i % 2):
            assert them.client.ends[name, choice].finish == "length", them.client.ends[name, choice]
            assert them.client.tokens[name, choice] == expected((i, i + 1), tokens, choice)


def test_streams_of_two_nodes_are_those_of_one_engine_through_cuts_of_every_kind() -> None:
    async def body() -> None:
        async with cluster(silence=1.0) as them:
            moves: list[int] = []
            them.set.on_move = lambda: moves.append(1)
            names = submit(them, tokens=700)
            await all_have(them, names, 50)
            assert {row.streams for row in them.set.rows()} == {4}
            them.proxies[0].end_connections()
            await all_have(them, names, 150)
            await ready(them.set, 2)
            for direction, goal in (("to_node", 250), ("to_front", 350)):
                proxy = them.proxies[1 if direction == "to_node" else 0]
                setattr(proxy, direction, False)
                await all_have(them, names, goal)
                await ready(them.set, 1)
                proxy.heal()
                proxy.end_connections()
                await ready(them.set, 2)
            await all_end_as_with_one_engine(them, names, 700)
            assert len(moves) >= 8
            async with asyncio.timeout(300):
                while any(node.node.num_live for node in them.nodes):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    run(body)


def test_a_node_replays_its_own_engine_and_nothing_moves() -> None:
    async def body() -> None:
        async with cluster() as them:
            moves: list[int] = []
            restarts: list[int] = []
            them.set.on_move, them.set.on_restart = lambda: moves.append(1), lambda: restarts.append(1)
            names = submit(them)
            await all_have(them, names, 40)
            os.kill(them.nodes[0].supervisor.pid or 0, signal.SIGKILL)
            await all_end_as_with_one_engine(them, names)
            await ready(them.set, 2)
            assert (moves, restarts) == ([], [1])
            assert sorted(row.restarts for row in them.set.rows()) == [0, 1]

    run(body)


def test_a_node_that_drains_hands_its_streams_over_and_takes_nothing_new() -> None:
    async def body() -> None:
        async with cluster() as them:
            names = submit(them)
            await all_have(them, names, 40)
            them.nodes[1].node.drain()
            async with asyncio.timeout(300):
                await them.nodes[1].node.empty()
            assert them.client.ends == {}
            rows = {row.name: row for row in them.set.rows()}
            drained = rows[str(them.proxies[1].address)]
            assert (drained.draining, drained.streams) == (True, 0)
            them.set.submit(request("new", (7,), tokens=5))
            await them.client.until(lambda: ("new", 0) in them.client.ends)
            assert them.nodes[1].node.num_live == 0

    run(body)


def test_two_fronts_share_nodes_and_each_gets_its_own_tokens_only() -> None:
    async def body() -> None:
        async with cluster() as them:
            addresses = [node.address for node in them.nodes]
            async with front(addresses) as (second, client):
                await ready(second, 2)
                names = submit(them)
                for i in range(8):
                    second.submit(request(f"s{i}", (100 + i,), tokens=150))
                await all_have(them, names, 40)
                os.kill(them.nodes[0].supervisor.pid or 0, signal.SIGKILL)
                await client.until(lambda: len(client.ends) == 8)
                assert all(client.tokens[f"s{i}", 0] == expected((100 + i,), 150) for i in range(8))
                assert not any(name.startswith("s") for name, _ in them.client.tokens)
                second.submit(request("left", (5,), tokens=900))
                await client.until(lambda: ("left", 0) in client.tokens)
            await all_end_as_with_one_engine(them, names)
            async with asyncio.timeout(300):
                while any(node.node.num_live for node in them.nodes):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert {node.node.num_fronts for node in them.nodes} == {1}

    run(body)


def test_a_poisonous_request_takes_one_node_s_engine_down_twice_and_no_other() -> None:
    async def body() -> None:
        async with cluster(model="poison:666") as them:
            names = submit(them)
            await all_have(them, names, 20)
            them.set.submit(request("bad", (666,)))
            await them.client.until(lambda: ("bad", 0) in them.client.ends)
            end = them.client.ends["bad", 0]
            assert (end.finish, end.culprit) == ("error", True)
            await all_end_as_with_one_engine(them, names)
            assert sorted(node.supervisor.restarts for node in them.nodes) == [0, 2]
            assert them.set.quarantine.refusal(request("again", (666,)), time.monotonic()) is not None

    run(body)


@pytest.mark.matrix  # the first test moves streams with tokens
def test_a_stream_that_came_with_tokens_is_replayed_with_them_by_its_second_node() -> None:
    async def body() -> None:
        async with cluster() as them:
            names = submit(them, tokens=500)
            await all_have(them, names, 40)
            them.proxies[0].end_connections()
            await all_have(them, names, 60)
            await ready(them.set, 2)
            for node in them.nodes:
                os.kill(node.supervisor.pid or 0, signal.SIGSEGV)
            await all_end_as_with_one_engine(them, names, 500)

    run(body)


@pytest.mark.matrix  # without processes: test_replicas.py
def test_a_node_that_gives_its_engine_up_ends_nothing() -> None:
    async def body() -> None:
        async with (
            served_node(max_restarts=0) as bad,
            served_node() as good,
            front([bad.address, good.address]) as (together, client),
        ):
            await ready(together, 2)
            for i in range(8):
                together.submit(request(f"r{i}", (i,), tokens=300))
            await client.until(lambda: len(client.tokens) == 8)
            os.kill(bad.supervisor.pid or 0, signal.SIGSEGV)
            async with asyncio.timeout(300):
                await bad.supervisor.dead
            await bad.node.close()
            await client.until(lambda: len(client.ends) == 8)
            assert all(client.tokens[f"r{i}", 0] == expected((i,), 300) for i in range(8))

    run(body)


@pytest.mark.matrix  # without processes: test_replicas.py; a stream that moves: the first test
def test_a_held_stream_waits_at_its_node_and_moves_held() -> None:
    async def body() -> None:
        async with cluster() as them:
            them.set.submit(request("r", (1,), tokens=300))
            await all_have(them, ["r"], 20)
            them.set.hold_request("r")
            await asyncio.sleep(0.3)
            had = len(them.client.tokens["r", 0])
            for proxy in them.proxies:
                proxy.end_connections()
            await ready(them.set, 2)
            await asyncio.sleep(0.3)
            assert len(them.client.tokens["r", 0]) == had < 300
            them.set.release_request("r")
            await them.client.until(lambda: ("r", 0) in them.client.ends)
            assert them.client.tokens["r", 0] == expected((1,), 300)

    run(body)


def test_a_front_may_come_before_its_nodes_model_is_loaded() -> None:
    async def body() -> None:
        async with (
            served_node() as good,
            served_node(model="slow-start:0.02", waits=False) as slow,
            front([slow.address, good.address]) as (together, _),
        ):
            assert together.trouble() is None
            assert together.load_ratio() < 1
            slow.begin()
            await ready(together, 2)
            await asyncio.sleep(0.05)
            assert {together._sums.of(row.name).blocks_total for row in together.rows()} == {512}

    run(body)


def test_where_no_node_is_left_streams_wait_for_one_and_then_end() -> None:
    async def body() -> None:
        async with cluster(1, wait=0.5) as them:
            them.set.submit(request("kept", (1,), tokens=300))
            await all_have(them, ["kept"], 20)
            them.proxies[0].end_connections()
            await them.client.until(lambda: ("kept", 0) in them.client.ends)
            assert them.client.tokens["kept", 0] == expected((1,), 300)
            them.set.submit(request("lost", (2,), tokens=900))
            await all_have(them, ["lost"], 20)
            them.proxies[0].to_node = them.proxies[0].to_front = False
            them.proxies[0].end_connections()
            await them.client.until(lambda: ("lost", 0) in them.client.ends)
            assert them.client.ends["lost", 0].error_code == "replica_lost"
            assert "no node serves" in (them.set.trouble() or "")
            assert them.set.rows()[0].state == EngineState.LOST.value

    run(body)


def test_a_node_that_cannot_keep_what_is_promised_is_named_and_not_used() -> None:
    wrong: list[tuple[dict[str, dict[str, Any]], str]] = [
        ({"identity": {"checkpoint": "another"}}, "another model"),
        ({"scheduler": {"max_model_len": 512}}, "512 max_model_len, this server promises 1024"),
        ({"scheduler": {"num_blocks": 80}}, "80 blocks in its pool"),
    ]

    async def body() -> None:
        async with AsyncExitStack() as stack:
            good = await stack.enter_async_context(served_node())
            plan = changed(good.supervisor.plan, identity={"checkpoint": "the model", "numerics": "same"})
            together, _ = await stack.enter_async_context(front([good.address]))
            for change, _ in wrong:
                other = await stack.enter_async_context(served_node(waits=False))  # whose engine nobody asks
                other.node.started(changed(plan, **change))
                together._sources += (Source(other.address, has_many=False),)
            await together._refresh()
            for number, (_, why) in enumerate(wrong, 1):
                async with asyncio.timeout(300):
                    while why not in together.rows()[number].why:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                assert together.rows()[number].state != "ready"
            assert together.trouble() is None

    run(body)


def test_nodes_of_a_file_join_and_leave_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "nodes"

    async def body() -> None:
        async with served_node() as one, served_node() as other:
            path.write_text(f"# those of today\n{one.address}\n\n")
            async with front([], files=[path]) as (together, client):
                assert [row.name for row in together.rows()] == [str(one.address)]
                path.write_text(f"{other.address}\n{one.address}\n")
                await ready(together, 2)
                path.write_text(f"{other.address}\nno address\n")  # says nothing: everybody stays
                await together._refresh()
                assert len(together.rows()) == 2
                path.write_text(f"{other.address}\n")
                one.node.drain()
                await one.node.close()
                async with asyncio.timeout(300):
                    while len(together.rows()) != 1:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                together.submit(request("served", (1,), tokens=20))
                await client.until(lambda: ("served", 0) in client.ends)
                assert client.tokens["served", 0] == expected((1,), 20)

    run(body)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10.0.0.7", "expected HOST:PORT"),
        ("10.0.0.7:0", "a node's port is not 0"),
        ("x" * (1 << 20) + "y:9000", "no list"),
    ],
)
def test_a_file_with_something_else_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "nodes"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_addresses(path)
