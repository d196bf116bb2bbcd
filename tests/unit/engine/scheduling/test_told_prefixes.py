"""What an engine tells a router of its cached prompt blocks, through evictions, resets and host memory; and silence."""

from __future__ import annotations

import random

import pytest

from quire_engine.contract.batch import SampledToken, StepResult
from quire_engine.contract.block_hashes import routed_names, short_name
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.contract.types import GenerationRequest, PrefixChanges, SamplingParams, StopParams
from quire_engine.routing.index import PrefixIndex
from quire_engine.scheduling.scheduler import Scheduler


def scheduler(*, tells: bool = True, num_blocks: int = 40, num_host_blocks: int = 0) -> Scheduler:
    limits = SchedulerLimits(max_num_batched_tokens=64, prefill_chunk=48, max_num_seqs=4)
    return Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=400,
            num_host_blocks=num_host_blocks,
            swap_seconds=1e-4,
            tells_prefixes=tells,
            limits=limits,
        )
    )


def prompt(rng: random.Random, number: int) -> tuple[int, ...]:
    begins = rng.randrange(4)
    return (*range(begins * 100, begins * 100 + rng.randrange(1, 90)), *[1000 + number] * rng.randrange(1, 60))


def serve(engine: Scheduler, index: PrefixIndex, prompts: list[tuple[int, ...]]) -> None:
    """All at once; every step's frame goes to the index at once."""
    for number, tokens in enumerate(prompts):
        stop, sampling = StopParams(max_new_tokens=20), SamplingParams(temperature=0.0)
        engine.add(
            GenerationRequest(request_id=str(number), prompt_token_ids=tokens, sampling=sampling, stop=stop), 0.0
        )
    while engine.has_work:
        batch = engine.schedule(0.0)
        assert batch is not None
        samples = {item.sequence_id: (SampledToken(token_id=7),) for item in batch.items if item.wants_sample}
        engine.apply(batch, StepResult(samples=samples), 0.0)
        frame = engine.take_prefixes()
        if frame is not None:
            assert index.apply("a", frame)
        engine.check_invariants()
        agree(engine, index)


def agree(engine: Scheduler, index: PrefixIndex) -> None:
    """All that the router believes is cached; a block of outputs or deep ones may be cached untold."""
    cached = set(map(short_name, engine._kv._cache.contents()))
    assert set(index._holders) <= cached


@pytest.mark.parametrize("num_host_blocks", [0, 30])
def test_the_index_has_what_the_cache_has(num_host_blocks: int) -> None:
    engine, index, rng = scheduler(num_host_blocks=num_host_blocks), PrefixIndex(), random.Random(3)
    index.add("a")
    prompts = [prompt(rng, number) for number in range(30)]
    serve(engine, index, prompts)
    assert engine.stats().total_kv_evictions > 0
    found = 0
    for tokens in prompts:
        names = routed_names(tokens, "", 16)
        cached = set(map(short_name, engine._kv._cache.contents()))
        depth = next((at for at, name in enumerate(names) if name not in cached), len(names))
        told = index.depths(names).get("a", 0)
        found += depth
        assert told <= depth
        if num_host_blocks == 0:
            assert told == depth
    assert found > 10


def test_a_reset_is_told_and_a_snapshot_repeats_what_was_told() -> None:
    engine, index, rng = scheduler(num_blocks=100), PrefixIndex(), random.Random(5)
    index.add("a")
    serve(engine, index, [prompt(rng, number) for number in range(8)])
    plain = engine.answer("prefixes", {})
    assert isinstance(plain, dict)
    other = PrefixIndex()
    other.add("a")
    other.replace("a", PrefixChanges(**plain))
    assert set(other._holders) == set(index._holders)
    engine.reset_prefix_cache()
    frame = engine.take_prefixes()
    assert frame is not None
    for each in (index, other):
        assert each.apply("a", frame)
        assert len(each) == 0


def test_an_engine_that_nobody_asked_tells_nothing() -> None:
    engine, index, rng = scheduler(tells=False), PrefixIndex(), random.Random(3)
    index.add("a")
    serve(engine, index, [prompt(rng, number) for number in range(8)])
    assert engine.take_prefixes() is None
    assert len(index) == 0
    assert engine.answer("prefixes", {}) == {"number": 0, "registered": (), "depths": (), "forgotten": ()}


def test_service_elsewhere_is_charged_from_the_second_word_on() -> None:
    """Of two tenants that wait, the one that others serve waits longer here."""
    engine = scheduler(num_blocks=400)

    def add(number: int, tenant: str, elsewhere: float) -> None:
        engine.add(
            GenerationRequest(
                request_id=f"{tenant}{number}",
                prompt_token_ids=(number + 10 * ord(tenant),) * 40,
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_new_tokens=2),
                tenant=tenant,
                service_elsewhere=elsewhere,
            ),
            0.0,
        )

    for number in range(6):
        add(number, "x", 10_000.0 + 500.0 * number)
        add(number, "y", 10_000.0)
    firsts = []
    while engine.has_work:
        batch = engine.schedule(0.0)
        assert batch is not None
        samples = {item.sequence_id: (SampledToken(token_id=7),) for item in batch.items if item.wants_sample}
        outputs = engine.apply(batch, StepResult(samples=samples), 0.0)
        firsts += [output.request_id[0] for output in outputs if output.finish is None]
    assert firsts.count("y") == 6
    assert firsts.index("y") < 3
    assert firsts[:8].count("y") >= 5
