"""Events of the cache of full blocks, with tokens: whoever follows them has what the cache has; and silence."""

from __future__ import annotations

import random

import pytest

from quire_engine.contract.batch import SampledToken, StepResult
from quire_engine.contract.block_hashes import block_hash, prompt_hashes, root_hash, short_name
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.contract.types import Adapter, CacheEvent, GenerationRequest, SamplingParams, StopParams
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_store import FakeStore

SIZE = 16


class Follower:
    """A router's view of the cache; each block is named again from the tokens that were told."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], bytes] = {}  # by group and name: the whole hash
        self.ever: dict[int, bytes] = {}
        self.num_stored = self.num_forgotten = 0

    def apply(self, events: tuple[CacheEvent, ...]) -> None:
        for event in events:
            if not event.token_ids:
                self.num_forgotten += len(event.blocks)
                for name in event.blocks:
                    del self.held[event.group, name]  # it was told
                continue
            assert len(event.token_ids) == SIZE * len(event.blocks)
            parent = root_hash(event.salt) if event.parent is None else self.ever[event.parent]
            for index, name in enumerate(event.blocks):
                parent = block_hash(parent, event.token_ids[index * SIZE : (index + 1) * SIZE])
                assert short_name(parent) == name
                assert (event.group, name) not in self.held, "a block was told twice"
                self.held[event.group, name] = self.ever[name] = parent
                self.num_stored += 1


def scheduler(*, tells: bool = True, num_blocks: int = 40, store: FakeStore | None = None, **fields) -> Scheduler:
    limits = SchedulerLimits(max_num_batched_tokens=64, prefill_chunk=48, max_num_seqs=4, block_size=SIZE)
    config = SchedulerConfig(num_blocks=num_blocks, max_model_len=400, tells_blocks=tells, limits=limits, **fields)
    return Scheduler(config, store=store) if store is not None else Scheduler(config)


def request(number: int, rng: random.Random) -> GenerationRequest:
    begins = rng.randrange(4)
    tokens = (*range(begins * 100, begins * 100 + rng.randrange(1, 90)), *[1000 + number] * rng.randrange(1, 60))
    asked = GenerationRequest(
        request_id=str(number),
        prompt_token_ids=tokens,
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_new_tokens=rng.choice([4, 40])),
        cache_salt=rng.choice(["", "", "team\0"]),
    )
    return asked.bound_to(Adapter(name="sql", digest="d1", path="/a") if number % 5 == 4 else None)


def agree(engine: Scheduler, follower: Follower) -> None:
    caches = engine._kv._caches.each
    cached = {(cache.group, short_name(content)) for cache in caches for content in cache.contents()}
    assert follower.held.keys() == cached


def serve(engine: Scheduler, follower: Follower, requests: list[GenerationRequest]) -> None:
    for each in requests:
        engine.add(each, 0.0)
    while engine.has_work:
        batch = engine.schedule(0.0)
        assert batch is not None
        samples = {item.sequence_id: (SampledToken(token_id=7),) for item in batch.items if item.wants_sample}
        engine.apply(batch, StepResult(samples=samples), 0.0)
        follower.apply(engine.take_cache_events())
        agree(engine, follower)


@pytest.mark.parametrize(
    ("num_blocks", "fields"),
    [
        (40, {}),
        (30, {"num_host_blocks": 40, "swap_seconds": 1e-9}),
        (90, {"windows": (None, 32)}),
    ],
    ids=["plain", "swapping", "windows"],
)
def test_who_follows_the_events_has_what_the_cache_has(num_blocks: int, fields: dict[str, object]) -> None:
    """Through evictions, swapped sequences, restored prefixes, windows, salts, adapters and a reset."""
    engine, follower, rng = scheduler(num_blocks=num_blocks, **fields), Follower(), random.Random(3)
    serve(engine, follower, [request(number, rng) for number in range(40)])
    assert engine.stats().total_kv_evictions > 0
    assert follower.num_forgotten > 10
    assert follower.num_stored > follower.num_forgotten
    if "num_host_blocks" in fields:
        stats = engine.stats()
        assert stats.total_swapped_in_blocks > 0
    if "windows" in fields:
        assert {group for group, _ in follower.held} == {0, 1}
    engine.reset_prefix_cache()
    follower.apply(engine.take_cache_events())
    agree(engine, follower)


def test_salts_and_adapters_are_told_with_their_blocks() -> None:
    engine = scheduler(num_blocks=100)
    plain = GenerationRequest(
        request_id="a",
        prompt_token_ids=tuple(range(40)),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_new_tokens=2),
        cache_salt="team\0mine",
    )
    follower = Follower()
    engine.add(plain.bound_to(Adapter(name="sql", digest="d1", path="/a")), 0.0)
    batch = engine.schedule(0.0)
    assert batch is not None
    samples = {item.sequence_id: (SampledToken(token_id=7),) for item in batch.items if item.wants_sample}
    engine.apply(batch, StepResult(samples=samples), 0.0)
    (event,) = engine.take_cache_events()
    assert (event.salt, event.adapter, event.parent) == ("team\0mine\1d1", "sql", None)
    assert event.token_ids == tuple(range(32))
    follower.apply((event,))


def test_blocks_that_come_from_files_are_told() -> None:
    store = FakeStore(random.Random(1), SIZE, {})
    engine, follower = scheduler(num_blocks=60, store=store), Follower()
    asked = GenerationRequest(
        request_id="a",
        prompt_token_ids=tuple(range(100)),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_new_tokens=2),
    )
    keys = prompt_hashes(asked.prompt_token_ids, "", SIZE)
    assert all(block is not None for block in engine.kept.adopt(asked, 2, keys[2:5]))
    events = engine.take_cache_events()
    assert [(event.parent, len(event.blocks)) for event in events] == [(short_name(keys[1]), 3)]
    follower.ever[short_name(keys[1])] = keys[1]
    follower.apply(events)
    agree(engine, follower)


def test_an_engine_that_nobody_asked_tells_nothing() -> None:
    engine, rng = scheduler(tells=False), random.Random(3)
    for number in range(8):
        engine.add(request(number, rng), 0.0)
    while engine.has_work:
        batch = engine.schedule(0.0)
        assert batch is not None
        samples = {item.sequence_id: (SampledToken(token_id=7),) for item in batch.items if item.wants_sample}
        engine.apply(batch, StepResult(samples=samples), 0.0)
    assert engine.stats().total_kv_evictions > 0
    assert engine.take_cache_events() == ()
