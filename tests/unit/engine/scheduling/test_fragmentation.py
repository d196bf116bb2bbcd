"""Samples of the pool's fragmentation: runs of free blocks, and slots of sequences that hold no token."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import groupby

import numpy as np
import pytest

from quire_engine.contract.types import FREE_RUN_BOUNDS, UNUSED_SLOT_BOUNDS, EngineStats
from quire_engine.scheduling.block_pool import BlockPool
from quire_engine.scheduling.log.fragmentation import Sizes
from support.fake_executor import new_run, request


def counted(sizes: list[int], bounds: tuple[int, ...]) -> tuple[int, ...]:
    counts = [0] * (len(bounds) + 1)
    for size in sizes:
        counts[bisect_left(bounds, size)] += 1
    return tuple(counts)


def test_runs_are_those_of_neighbouring_blocks_without_a_reference() -> None:
    dice = random.Random(3)
    for num_blocks in (1, 2, 7, 64):
        pool = BlockPool(num_blocks)
        assert pool.free_runs().tolist() == [num_blocks]
        for block in [pool.take() for _ in range(num_blocks)]:
            if dice.random() < 0.5:
                pool.drop(block)
                (pool.keep if dice.random() < 0.5 else pool.free)(block)
        is_free = [pool.refs(block) == 0 for block in range(num_blocks)]
        assert pool.free_runs().tolist() == [len(list(run)) for free, run in groupby(is_free) if free]
    assert BlockPool(3).free_runs().sum() == 3


@pytest.mark.parametrize("bounds", [FREE_RUN_BOUNDS, UNUSED_SLOT_BOUNDS], ids=["runs", "slots"])
def test_sizes_are_counted_by_bounds(bounds: tuple[int, ...]) -> None:
    pool, dice, sizes = Sizes(bounds), random.Random(5), list[int]()
    for most in (0, 1, 9, bounds[-1] + 2):
        more = [dice.randint(0, most) for _ in range(50)]
        sizes += more
        pool.add(np.array(more))
        pool.add(np.array([], dtype=np.int64))
        assert (pool.counts, pool.total) == (counted(sizes, bounds), sum(sizes))


@pytest.mark.parametrize("streams", [1, 24], ids=["by themselves", "in columns"])
def test_a_sample_is_taken_at_most_once_a_second_and_agrees_with_the_gauges(streams: int) -> None:
    run, before, sampled = new_run(num_blocks=512, max_num_seqs=32), EngineStats(), list[int]()
    run.add(*[request(f"r{each}", prompt=16 + each, max_tokens=60, penalty=0.0) for each in range(streams)])
    for step in range(24):
        run.one_step()
        if step >= 8:
            run.now -= 0.75  # a step takes a quarter of a second from now on
        stats = run.scheduler.stats()
        assert run.scheduler.stats() == stats
        more = sum(stats.total_unused_slots) - sum(before.total_unused_slots)
        if more:
            sampled.append(step)
            assert more == stats.running
            assert stats.total_unused_slots_sum - before.total_unused_slots_sum == stats.slots_unused
            assert stats.total_free_run_blocks - before.total_free_run_blocks == 512 - stats.blocks_used
        else:
            assert stats.total_free_runs == before.total_free_runs
        before = stats
    assert (sampled, before.running) == ([*range(9), 12, 16, 20], streams)
