"""The facts' own arithmetic, which is not read off any server, and how they are told."""

from __future__ import annotations

import doctest

import pytest

from quire_bench.facts import memory
from quire_bench.facts.fact import at_most, equal, near, not_shown
from quire_bench.facts.timing import PoolLoad, pool_load
from quire_engine.cost_model import CostModel
from quire_engine.simulation.setup import Setup
from quire_engine.simulation.simulator import simulate
from quire_engine.simulation.traces import TraceRow
from quire_server.metrics.alert_rules import RULES

COST = CostModel(step=0.01, row=0.0001, prompt=((1, 0.01), (513, 0.1)))


def test_the_memory_of_keys_and_values() -> None:
    assert doctest.testmod(memory).failed == 0
    assert doctest.testmod(memory).attempted == 2


def test_a_fact_says_both_numbers_and_whether_they_agree() -> None:
    assert equal("F1", 480, 480).ok
    wrong = equal("F1 slots", 1024, 1023)
    assert (wrong.ok, wrong.expected, wrong.got) == (False, "1,024", "1,023")
    assert near("F14", 0.2, 0.17, within=0.2).ok
    assert not near("F14", 0.2, 0.15, within=0.2).ok
    assert near("F2", 0.53125, 0.53125, within=0.0).ok
    assert not near("F2", 0.53125, 0.5313, within=0.0).ok
    assert at_most("F18", 5, 5).ok
    assert not at_most("F18", 5, 5.1).ok
    assert [at_most("F18", 5, got).verdict for got in (5, 6)] == ["ok", "NOT SO"]
    skipped = not_shown("F17 alerts", "too few seats")
    assert (skipped.verdict, skipped.got, skipped.ok) == ("not shown here", "too few seats", True)


@pytest.mark.parametrize(
    ("seats", "max_model_len", "pool"),
    [(8, 512, 4096), (8, 512, 4222), (8, 2048, 4096), (64, 512, 8192), (1, 4096, 2048), (128, 256, 16384)],
)
def test_the_load_of_the_full_cache_keeps_the_pool_above_the_alert(seats: int, max_model_len: int, pool: int) -> None:
    """By the scheduler that serves, without a server: the mean over the middle of a closed loop's steps."""
    load = pool_load(pool=pool, seats=seats, max_model_len=max_model_len, block_size=16, step_tokens=512)
    assert isinstance(load, PoolLoad)
    assert load.prompt + load.answer <= min(max_model_len, pool)
    limits = {"max_num_seqs": seats, "max_num_batched_tokens": 512, "prefill_chunk": 512}
    server = {"num_blocks": pool // 16, "max_model_len": max_model_len, "max_num_queued_reqs": 1000}
    setup = Setup(cost=COST).with_settings([*(limits | server).items(), ("enable_prefix_caching", False)])
    row = TraceRow(at=0.0, input_tokens=load.prompt, output_tokens=load.answer)
    moments = simulate(setup, [row] * (4 * load.streams)).moments
    middle = moments[len(moments) // 4 : len(moments) * 3 // 4]
    used = sum(moment.blocks_used for moment in middle) / len(middle) / (pool // 16)
    (full,) = [rule.threshold for rule in RULES if rule.name == "QuireKVCacheFull"]
    assert used > full


def test_seats_that_cannot_fill_the_pool_are_the_reason_that_it_is_not_shown() -> None:
    """Eight sequences of the longest context hold half of the pool."""
    reason = pool_load(pool=8192, seats=8, max_model_len=512, block_size=16, step_tokens=512)
    assert reason == "8 sequences of 512 tokens fill at most 50% of the pool's 8,192"
