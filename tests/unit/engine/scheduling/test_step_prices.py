"""What a row and a prompt's token are worth, learned from steps whose times are known."""

from __future__ import annotations

import pytest

from quire_engine.scheduling.step_prices import StepPrices


def learned(*sizes: int, fixed: float, row: float, token: float) -> StepPrices:
    """Prices after two steps of each of these sizes, then a prompt of 64 tokens beside two rows."""
    prices = StepPrices()
    for size in sizes:
        for _ in range(2):
            prices.learn(prompt_tokens=0, num_decodes=size, seconds=fixed + row * size)
    prices.learn(prompt_tokens=64, num_decodes=2, seconds=fixed + row * 2 + token * 64)
    return prices


def test_nothing_is_known_at_first() -> None:
    prices = StepPrices()
    assert prices.gain_for_loss(1) is None
    prices.learn(prompt_tokens=0, num_decodes=4, seconds=1.0)
    assert prices.gain_for_loss(1) is None, "what a prompt takes is not known"


def test_a_row_is_worth_its_part_of_the_fixed_seconds() -> None:
    prices = learned(1, 4, 32, fixed=20.0, row=0.2, token=0.5)
    assert prices.gain_for_loss(8) == pytest.approx(0.5 / (20 / 8 - 0.5))
    assert prices.gain_for_loss(32) == pytest.approx(0.5 / (20 / 32 - 0.5))
    assert prices.gain_for_loss(40) == float("inf"), "a token takes as long as the row would save"
    assert learned(1, 8, fixed=1.0, row=0.0, token=0.0).gain_for_loss(100) == 0.0


def test_of_one_size_an_eighth_of_a_step_is_assumed_for_each_further_row() -> None:
    prices = learned(8, fixed=16.0, row=0.0, token=0.0)
    prices.learn(prompt_tokens=100, num_decodes=8, seconds=16.0 + 100.0)
    prices.learn(prompt_tokens=100, num_decodes=8, seconds=16.0 + 100.0)
    assert prices.gain_for_loss(4) == pytest.approx(1.0 / (16.0 / 2 / 4 - 1.0))


def test_one_slow_step_changes_nothing() -> None:
    prices = learned(1, 8, fixed=10.0, row=1.0, token=0.1)
    before = prices.gain_for_loss(4)
    prices.learn(prompt_tokens=0, num_decodes=8, seconds=500.0)
    assert prices.gain_for_loss(4) == before
    prices.learn(prompt_tokens=64, num_decodes=0, seconds=500.0)
    assert prices.gain_for_loss(4) == before


def test_a_machine_that_has_become_slow_is_learned_by_two_steps() -> None:
    prices = learned(1, fixed=10.0, row=0.0, token=0.1)
    before = prices.gain_for_loss(4)
    for _ in range(2):
        prices.learn(prompt_tokens=0, num_decodes=1, seconds=20.0)
    assert before is not None
    assert prices.gain_for_loss(4) != before


def test_short_prompts_say_nothing() -> None:
    prices = learned(1, 8, fixed=10.0, row=1.0, token=0.1)
    before = prices.gain_for_loss(4)
    for _ in range(2):
        prices.learn(prompt_tokens=7, num_decodes=8, seconds=100.0)
    assert prices.gain_for_loss(4) == before
