"""What a prompt token costs, from what steps took; and the seconds that found tokens saved."""

from __future__ import annotations

import pytest

from quire_server.metrics.metrics import Metrics
from quire_server.metrics.step_metrics import PrefillCost
from support.exposition import Scrape, busy


def test_the_slope_is_not_the_mean() -> None:
    cost = PrefillCost()
    for tokens in (100, 400, 30, 512, 250):
        cost.learn(prompt_tokens=tokens, num_decodes=0, seconds=0.05 + 0.001 * tokens)
    assert cost.seconds_per_token == pytest.approx(0.001)


def test_steps_of_one_size_give_their_mean() -> None:
    cost = PrefillCost()
    assert cost.seconds_per_token == 0
    for _ in range(20):
        cost.learn(prompt_tokens=100, num_decodes=0, seconds=0.2)
    assert cost.seconds_per_token == pytest.approx(0.002)


def test_steps_that_are_mostly_decodes_say_nothing() -> None:
    cost = PrefillCost()
    cost.learn(prompt_tokens=100, num_decodes=10, seconds=0.11)
    cost.learn(prompt_tokens=30, num_decodes=10, seconds=9.0)
    cost.learn(prompt_tokens=0, num_decodes=10, seconds=9.0)
    assert cost.seconds_per_token == pytest.approx(0.001)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    cost = PrefillCost()
    for seconds in (0.001, 0.004):
        for step in range(400):
            cost.learn(prompt_tokens=100 + step % 7 * 50, num_decodes=0, seconds=seconds * (100 + step % 7 * 50))
    assert cost.seconds_per_token == pytest.approx(0.004, rel=0.05)


def test_found_tokens_are_counted_at_the_price_of_their_time() -> None:
    metrics = Metrics("tiny")
    step = {"prefill_tokens": 100, "decode_tokens": 0, "step_seconds": 0.101, "host_seconds": 0.001}
    metrics.observe_step(busy(**step))
    metrics.observe_step(busy(**step, total_prefill_tokens_saved=300))
    metrics.engine_restarted()
    metrics.observe_step(busy(**step, total_prefill_tokens_saved=50))
    scrape = Scrape(metrics)
    assert scrape("quire_prefill_tokens_saved_total") == 350
    assert scrape("quire_prefill_seconds_saved_total") == pytest.approx(0.35)


def test_shared_blocks_are_shown() -> None:
    metrics = Metrics("tiny")
    metrics.observe_step(busy(blocks_shared=12, blocks_unshared=4, blocks_saved=180, waiting={"prefix": 5}))
    scrape = Scrape(metrics)
    assert scrape("quire_kv_blocks_held", by="several") == 12
    assert scrape("quire_kv_blocks_held", by="one") == 4
    assert scrape("quire_kv_blocks_saved") == 180
    assert scrape("quire_requests_waiting", reason="prefix") == scrape("vllm:num_requests_waiting") == 5
