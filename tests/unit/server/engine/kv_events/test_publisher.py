"""KV events over real sockets: the bytes as vLLM's subscribers read them, gaps, replays, dumps, and the flag's keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import CacheEvent
from quire_server.engine.kv_events.configured import cache_listeners, kv_events_config
from quire_server.engine.kv_events.events import KVEventsConfig
from quire_server.engine.kv_events.publisher import Publisher
from support.fake_engine_process import make_plan
from support.kv_subscriber import Subscriber

SIZE = 4


def plan(windows: tuple[int | None, ...] = (None,)) -> EnginePlan:
    made = make_plan("ok")
    limits = SchedulerLimits(block_size=SIZE)
    return replace(made, scheduler=replace(made.scheduler, limits=limits, windows=windows))


def stored(first: int, count: int, parent: int | None = None, **fields: Any) -> CacheEvent:
    blocks = tuple(range(first, first + count))
    tokens = tuple(range(first * 10, first * 10 + SIZE * count))
    return CacheEvent(blocks=blocks, token_ids=tokens, parent=parent, **fields)


@contextmanager
def published(tmp_path: Path, rank: int = 0, **fields: Any) -> Iterator[tuple[Publisher, Subscriber]]:
    """A publisher and a subscriber that is connected before the first event."""
    config = KVEventsConfig(
        endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=f"ipc://{tmp_path}/replay", topic="kv-events", **fields
    )
    publisher = Publisher(config, rank)
    subscriber = Subscriber(config.endpoint, config.replay_endpoint, topic="kv-events")
    try:
        publisher.begins(plan())
        publisher.ends()  # until the subscriber is there, batches are lost
        subscriber.joined(publisher.ends)
        publisher.begins(plan())
        yield publisher, subscriber
    finally:
        subscriber.close()
        publisher.close()


def test_a_batch_is_what_subscribers_of_vllm_decode(tmp_path: Path) -> None:
    with published(tmp_path, rank=3) as (publisher, subscriber):
        publisher.changes([stored(7, 2, parent=5, salt="team\0x\1digest", adapter="sql"), CacheEvent(blocks=(7,))])
        publisher.changes([stored(20, 2, salt="mine")])
        topic, number, payload = subscriber.raw()
        assert topic == b"kv-events"
        assert len(number) == 8
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 3
        assert events == [
            {
                "type": "BlockStored",
                "block_hashes": [7, 8],
                "parent_block_hash": 5,
                "token_ids": [70, 71, 72, 73, 74, 75, 76, 77],
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": "sql",
                "extra_keys": [["sql"], ["sql"]],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
        ]
        _, following, payload = subscriber.raw()
        assert int.from_bytes(following, "big") == int.from_bytes(number, "big") + 1
        (event,) = msgspec.msgpack.decode(payload)[1]
        assert event["parent_block_hash"] is None
        assert event["extra_keys"] == [["mine"], None]


def test_a_window_is_told_with_its_group(tmp_path: Path) -> None:
    with published(tmp_path) as (publisher, subscriber):
        publisher.begins(plan((None, 32)))
        publisher.changes([stored(1, 1, group=1)])
        (event,) = msgspec.msgpack.decode(subscriber.raw()[2])[1]
        assert (event["group_idx"], event["kv_cache_spec_kind"]) == (1, "sliding_window")
        assert event["kv_cache_spec_sliding_window"] == 32


def test_a_gap_is_filled_by_a_replay(tmp_path: Path) -> None:
    with published(tmp_path) as (publisher, subscriber):
        publisher.changes([stored(1, 3)])
        subscriber.until({(0, 1), (0, 2), (0, 3)})
        publisher.changes([CacheEvent(blocks=(3,))])
        subscriber.raw()  # lost on its way
        publisher.changes([stored(9, 1)])
        subscriber.until({(0, 1), (0, 2), (0, 9)})
        assert subscriber.num_replays == 1
        assert subscriber.num_cleared == 0


def test_a_replay_beyond_what_is_kept_is_a_dump(tmp_path: Path) -> None:
    """Also for a subscriber that comes late. A block comes after the one before it, whatever their order of arrival."""
    with published(tmp_path, buffer_steps=2) as (publisher, subscriber):
        publisher.changes([stored(1, 3)])
        publisher.changes([CacheEvent(blocks=(2,))])
        publisher.changes([stored(50, 1, parent=1)])
        publisher.changes([CacheEvent(blocks=(2,)), stored(2, 1, parent=1)])  # again, after 3, which follows it
        subscriber.until({(0, 1), (0, 2), (0, 3), (0, 50)})
        with Subscriber(subscriber.endpoint, subscriber.replay_endpoint, topic="kv-events") as late:
            late.replay(0)
        assert late.held == subscriber.held
        assert late.num_cleared == 1
        seen: list[int] = []
        for event in late.stored:
            assert event["parent_block_hash"] is None or event["parent_block_hash"] in seen
            seen += event["block_hashes"]
            assert len(event["token_ids"]) == SIZE * len(event["block_hashes"])
        assert sorted(seen) == [1, 2, 3, 50]
        assert late.tokens[0, 2] == [20, 21, 22, 23]


def test_an_engine_that_ends_leaves_nothing(tmp_path: Path) -> None:
    with published(tmp_path) as (publisher, subscriber):
        publisher.changes([stored(1, 3)])
        subscriber.until({(0, 1), (0, 2), (0, 3)})
        publisher.ends()
        subscriber.until(set())
        publisher.begins(plan())
        publisher.changes([stored(4, 1)])
        subscriber.until({(0, 4)})
        with Subscriber(subscriber.endpoint, subscriber.replay_endpoint, topic="kv-events") as late:
            late.replay(0)
        assert late.held == {(0, 4)}


def test_who_falls_behind_publishes_one_dump(tmp_path: Path) -> None:
    with published(tmp_path, max_queue_size=0) as (publisher, subscriber):
        for number in range(20):
            publisher.changes([stored(number, 1)])
            publisher.changes([CacheEvent(blocks=(number,))])
        publisher.changes([stored(100, 1)])
        subscriber.until({(0, 100)})
        assert subscriber.num_cleared > 0


def test_a_subscriber_may_wait_for_its_publishers(tmp_path: Path) -> None:
    """As a router does that many publishers connect to: an endpoint without a star is connected to."""
    context = zmq.Context()
    waiting = context.socket(zmq.SUB)
    port = waiting.bind_to_random_port("tcp://127.0.0.1")
    waiting.subscribe(b"")
    publisher = Publisher(KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"))
    try:
        for _ in range(2000):
            publisher.ends()
            if waiting.poll(10):
                break
        assert msgspec.msgpack.decode(waiting.recv_multipart()[2])[1] == [{"type": "AllBlocksCleared"}]
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_nonsense_in_place_of_a_number_is_passed_over(tmp_path: Path) -> None:
    with published(tmp_path) as (publisher, subscriber):
        for parts in ([b"", b"123"], [b"x"], [b"", b"", b"", b""]):
            subscriber.ask.send_multipart(parts)
        publisher.changes([stored(1, 1)])
        subscriber.replay(0)
        assert subscriber.held == {(0, 1)}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"enable_kv_cache_events": True, "endpont": "x"}, "'endpont' is no key"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events is 1"),
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, "publisher is 'kafka'"),
        ({"enable_kv_cache_events": True, "hwm": -1}, "hwm is -1"),
        ({"enable_kv_cache_events": True, "endpoint": 5557}, "endpoint is 5557"),
        ({"enable_kv_cache_events": True, "endpoint": "localhost:5557"}, "expected tcp://HOST:PORT"),
    ],
)
def test_a_wrong_key_is_named(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-events-config: ") as caught:
        kv_events_config(given)
    assert line in str(caught.value)


def test_events_are_off_unless_enabled() -> None:
    assert kv_events_config({}) is None
    assert kv_events_config({"endpoint": "tcp://*:1"}) is None
    assert kv_events_config({"enable_kv_cache_events": True, "publisher": "null"}) is None
    assert kv_events_config({"enable_kv_cache_events": True}) == KVEventsConfig()
    assert cache_listeners({}, 2) == []


def test_each_engine_has_endpoints_of_its_own(tmp_path: Path) -> None:
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5600")
    assert config.of_rank(0) == config
    assert config.of_rank(2) == KVEventsConfig(endpoint="tcp://*:5559", replay_endpoint="tcp://*:5602")
    end = f"ipc://{tmp_path}/a"
    made = cache_listeners({"enable_kv_cache_events": True, "endpoint": end}, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a_dp1"]
    with pytest.raises(ConfigError, match="no port"):
        replace(config, endpoint="tcp://*").of_rank(1)
    for each in made:
        each.close()


def test_an_endpoint_that_is_taken_is_named() -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://*")
    with pytest.raises(ConfigError, match=f"endpoint tcp://\\*:{port}: Address already in use"):
        Publisher(KVEventsConfig(endpoint=f"tcp://*:{port}"))
    context.destroy(linger=0)
