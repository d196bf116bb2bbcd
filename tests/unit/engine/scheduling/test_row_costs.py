"""What a step's rows cost, learned from steps whose times scatter, and the number of drafts that follows from it."""

from __future__ import annotations

import random

import pytest

from quire_engine.scheduling.speculation import DraftingCosts, RowCosts


def learned(per_row: float, rows: tuple[int, ...], *, num_steps: int = 600, scatter: float = 0.4) -> RowCosts:
    """After steps of a millisecond and so much more a row; each fiftieth was held up for a hundred milliseconds."""
    dice, costs = random.Random(len(rows)), RowCosts()
    for step in range(num_steps):
        count = dice.choice(rows)
        seconds = 0.1 if step % 50 == 0 else (1e-3 + per_row * count) * dice.uniform(1 - scatter, 1 + scatter)
        costs.learn(count, seconds)
    return costs


@pytest.mark.parametrize("rows", [(1, 4, 6), (8, 13, 18), (8,)])
def test_cheap_rows_take_many_drafts_and_dear_ones_none(rows: tuple[int, ...]) -> None:
    assert learned(1e-6, rows).best(8, 5, 0.9) >= 4  # twelve rows are two tiles
    if len(rows) > 1:  # of one number of rows nothing is known but what the kernels' shape says
        assert learned(3e-3, rows).best(8, 5, 0.3) == 0


def test_drafts_that_are_hardly_right_never_pay() -> None:
    for costs in (RowCosts(), learned(1e-6, (1, 4, 6))):
        assert costs.best(1, 5, 0.01) == 0
        assert costs.best(1, 5, 0.99) == 5


def test_a_gain_of_less_than_a_twentieth_is_left() -> None:
    assert learned(0.0, (32, 40)).best(32, 1, 1.0) == 0
    assert learned(0.0, (32, 40)).best(32, 5, 1.0) >= 4


def test_a_slow_beginning_is_forgotten() -> None:
    """The first steps of a process take many times as long; those of six rows come later and are still known cheap."""
    costs = RowCosts()
    for _ in range(5):
        costs.learn(6, 0.2)
    for _ in range(600):
        costs.learn(1, 1e-3)
        costs.learn(6, 1.1e-3)
    assert costs.best(1, 5, 0.5) >= 3


def test_a_full_step_takes_no_drafts() -> None:
    assert RowCosts().may_pay(63)
    assert not RowCosts().may_pay(64)


def test_drafts_of_a_costly_drafter_pay_for_its_time_too() -> None:
    """Rows that cost nearly nothing: so much the time to guess decides, and the likelihood of each sequence."""
    rows = learned(1e-6, (1, 4, 6))  # a step takes a millisecond
    free, cheap, dear = (learned_drafting(seconds) for seconds in (1e-9, 1e-4, 1e-3))
    assert rows.best_round(1, [0.9], 5, free) == (1, 5)
    assert rows.best_round(1, [0.7], 5, free)[1] >= rows.best_round(1, [0.7], 5, cheap)[1] > 0
    assert rows.best_round(1, [0.9], 5, dear) == (0, 0), "a guess takes as long as the token itself"
    count, each = rows.best_round(4, [0.9, 0.9, 0.01, 0.0], 5, free)
    assert 2 <= count < 4
    assert each >= 3
    assert rows.best_round(1, [0.01], 5, free) == (0, 0)


def learned_drafting(seconds: float) -> DraftingCosts:
    """After calls for one sequence that took as long."""
    costs = DraftingCosts()
    for _ in range(20):
        costs.learn(1, seconds)
    return costs


def test_long_calls_of_a_drafter_say_little_and_short_ones_much() -> None:
    costs = DraftingCosts()
    costs.learn(1, 0.1)  # the first of a process
    for _ in range(8):
        costs.learn(1, 1e-3)
    assert 1e-3 <= costs.seconds(1) < 1.5e-3
    costs.learn(8, 0.1)
    assert costs.seconds(1) < 2e-3
    for _ in range(50):
        costs.learn(1, 3e-3)
    assert costs.seconds(1) == pytest.approx(3e-3, rel=0.05)
    assert costs.seconds(1) < costs.seconds(8) < 2 * costs.seconds(1)
