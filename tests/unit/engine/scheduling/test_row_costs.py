"""What a step's rows cost, learned from steps whose times scatter, and the number of drafts that follows from it."""

from __future__ import annotations

import random

import pytest

from quire_engine.scheduling.speculation import DraftingCosts, RowCosts, measured_stairs


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
    assert RowCosts().may_pay(63, None)
    assert not RowCosts().may_pay(64, None)


def test_nothing_is_looked_for_where_not_even_certain_drafts_would_pay() -> None:
    """At 63 streams five more tokens are a gain of eight hundredths, less than a further tile costs."""
    costs = RowCosts()
    assert costs.may_pay(1, 5)
    assert costs.may_pay(25, 5)
    assert not costs.may_pay(63, 5)
    assert not costs.may_pay(25, 1)
    for rows in range(1, 64):
        found = [costs.best(rows, most, share) for most in (1, 3, 5) for share in (0.3, 0.9, 1.0)]
        assert costs.may_pay(rows, 5) or not any(found)


INT4 = {1: 7.1e-3, 2: 7.4e-3, 3: 7.5e-3, 4: 7.6e-3, 5: 7.9e-3, 6: 9.8e-3, 7: 10.3e-3, 12: 12.4e-3, 64: 56.5e-3}
BF16 = {1: 21.6e-3, 6: 22.4e-3, 7: 26.0e-3, 12: 27.1e-3, 13: 29.8e-3, 18: 32.2e-3, 32: 48.3e-3, 64: 91.3e-3}


@pytest.mark.parametrize("num_steps", [0, 100])
def test_measured_stairs_tell_where_a_further_row_is_dear(num_steps: int) -> None:
    """Four drafts are one int4 step with five rows; the sixth row costs a quarter more. In bf16 it is nearly free."""
    int4, bf16 = RowCosts(INT4), RowCosts(BF16)
    for step in range(num_steps):  # slower, as behind long contexts: the shape stays
        for costs, measured in ((int4, INT4), (bf16, BF16)):
            rows = (1, 5)[step % 2]
            costs.learn(rows, 5e-3 + measured_stairs(measured)[rows])
    assert int4.best(1, 5, 0.7) == 4
    assert bf16.best(1, 5, 0.7) == 5
    assert RowCosts().best(1, 5, 0.7) == 5
    assert not int4.may_pay(32, 5), "each row costs what it brings"


def test_a_measurement_that_was_disturbed_is_no_step_upwards() -> None:
    stairs = measured_stairs({1: 1.0, 2: 9.0, 4: 1.2, 6: 1.4, 12: 2.0})
    assert stairs[1:7] == pytest.approx([1.0, 1.2, 1.2, 1.2, 1.3, 1.4])
    assert stairs == sorted(stairs)
    assert len(stairs) == 13


def test_beyond_what_was_measured_the_stairs_of_six_go_on() -> None:
    """As where steps are so slow that the time was up: in proportion to the last."""
    costs, stairs = RowCosts({1: 0.3, 2: 0.3, 3: 0.36}), measured_stairs({})
    assert costs._cost(3) == 0.36
    assert costs._cost(30) == pytest.approx(0.36 * stairs[30] / stairs[3])
    assert costs._cost(500) > costs._cost(300) > costs._cost(64)
    assert RowCosts()._cost(500) > RowCosts()._cost(128)


def test_the_first_steps_of_a_process_count_for_little_where_rows_were_measured() -> None:
    costs = RowCosts(INT4)
    for _ in range(3):
        costs.learn(1, 2.0)
    assert costs._cost(1) < 3 * INT4[1]


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


def test_rows_that_cost_nothing_have_no_line() -> None:
    costs = RowCosts({1: 1e-3, 64: 1e-3})
    assert costs._cost(1) == costs._cost(64) == pytest.approx(1e-3)
    for _ in range(200):
        costs.learn(8, 2e-3)
    assert costs._cost(1) == pytest.approx(2e-3, rel=0.2)
    assert costs.best(30, 5, 0.9) == 5
