"""What a row and a prompt's token are worth, learned from steps whose times are known."""

from __future__ import annotations

import pytest

from quire_engine.scheduling.step_prices import StepPrices
from support.fake_executor import new_run, request


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


def test_a_step_is_expected_to_take_what_its_decodes_and_its_prompt_take() -> None:
    prices = StepPrices()
    assert prices.seconds_of(prompt_tokens=0, num_decodes=4) is None
    prices.learn(prompt_tokens=64, num_decodes=0, seconds=32.0)
    assert prices.seconds_of(prompt_tokens=10, num_decodes=0) == pytest.approx(5.0), "decodes are not known yet"
    assert prices.seconds_of(prompt_tokens=0, num_decodes=4) is None
    prices = learned(1, 4, 32, fixed=20.0, row=0.2, token=0.5)
    assert prices.seconds_of(prompt_tokens=0, num_decodes=8) == pytest.approx(21.6)
    assert prices.seconds_of(prompt_tokens=100, num_decodes=8) == pytest.approx(71.6)


def test_steps_are_told_with_what_was_expected_before_them() -> None:
    """Prompts always, and of the steps without one each sixteenth; a slow step is known by its own ratio alone."""
    run, told = new_run(num_blocks=64), {}
    run.add(request("a", prompt=16, max_tokens=70))
    while run.scheduler.has_work:
        if run.step == 40:
            run.add(request("b", prompt=16, max_tokens=2))
        run.seconds_per_token = 3.0 if run.step == 47 else 0.0
        run.one_step()
        told[run.step] = run.scheduler.stats()
    expected = {step: (stats.seen_seconds, stats.predicted_seconds) for step, stats in told.items()}
    assert {step: times for step, times in expected.items() if times[1]} == {
        **dict.fromkeys((16, 32, 64), pytest.approx((1.0, 1.0))),
        41: pytest.approx((1.0, 2.0)),  # the first prompt had the whole of its step
        48: pytest.approx((4.0, 1.0)),
    }
    assert (told[1].step_rows, told[2].step_rows, told[41].step_rows) == (16, 1, 17)
