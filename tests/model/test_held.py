"""Requests that are held and released get their solo tokens and log-probabilities, to the last bit."""

from __future__ import annotations

import pytest

from model.test_bitwise import engine, mixed_requests, solo
from model.test_swapped import tight
from support.covering import few
from support.holding import Holding
from support.offline import generate


@pytest.fixture(scope="module")
def expected():
    """Greedy and sampled, one choice and several, with penalties and scores of the prompt; each alone, by model."""
    cache = {}

    def run(model):
        if model not in cache:
            requests = mixed_requests(12, seed=11, max_new=24)
            cache[model] = requests, solo(requests, model=model)
        return cache[model]

    return run


@pytest.mark.parametrize(
    ("model", "caching"), few([("qwen3", True), ("qwen3", False), ("bf16", True)], ("qwen3", True), ("bf16", True))
)
def test_held_equals_solo(model, caching, expected):
    requests, results = expected(model)
    holding = Holding(seed=3, chance=0.3)
    built = engine(model, enable_prefix_caching=caching, prefill_chunk=24)
    assert generate(built, requests, between=holding) == results
    assert holding.num_holds > len(requests)
    stats = built.scheduler.stats()
    assert (stats.held, stats.blocks_used, stats.total_preemptions) == (0, 0, 0)


def test_held_beside_preemption_and_swap_equals_solo(expected):
    requests, results = expected("qwen3")
    holding = Holding(seed=4, chance=0.5)
    built = tight("qwen3", requests, enable_prefix_caching=True, prefill_chunk=24)
    assert generate(built, requests, between=holding) == results
    assert holding.num_holds > len(requests)
    stats = built.scheduler.stats()
    assert stats.total_preemptions > 0
    assert stats.host_blocks_used == 0
