"""The budget of thinking: a function of the output's tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire_engine.contract.types import ThinkingParams
from quire_engine.execution.constrained.constraints import Thinking

START, END = 8, 9


def written(params: ThinkingParams, wanted: list[int]) -> list[int]:
    """What comes of an output that would be `wanted`, with what is forced put in."""
    thinking, output = Thinking(params), []
    for token in wanted:
        while thinking.forced is not None:
            output.append(thinking.forced)
            thinking.push(output[-1])
        output.append(token)
        thinking.push(token)
    return output


def test_an_open_block_ends_when_its_budget_is_spent():
    params = ThinkingParams(end_ids=(END,), is_open=True, max_tokens=3)
    assert written(params, [1, 2, 3, 4, 5]) == [1, 2, 3, END, 4, 5]


def test_a_block_that_ends_in_time_is_left_alone():
    params = ThinkingParams(end_ids=(END,), is_open=True, max_tokens=3)
    assert written(params, [1, END, 3, 4, 5, 6]) == [1, END, 3, 4, 5, 6]
    assert written(params, [1, 2, END, 4, 5, 6]) == [1, 2, END, 4, 5, 6]


def test_a_block_that_has_to_begin_is_counted_from_there():
    params = ThinkingParams(end_ids=(END,), start_ids=(START,), max_tokens=2)
    assert written(params, [1, 2, 3, START, 4, 5, 6]) == [1, 2, 3, START, 4, 5, END, 6]
    assert written(params, [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]


def test_no_budget_ends_a_block_at_once():
    params = ThinkingParams(end_ids=(7, END), is_open=True, max_tokens=0)
    assert written(params, [1]) == [7, END, 1]


def test_an_end_of_several_tokens_is_forced_whole():
    params = ThinkingParams(end_ids=(6, 7, END), is_open=True, max_tokens=2)
    assert written(params, [1, 2, 3]) == [1, 2, 6, 7, END, 3]
    assert written(params, [6, 7, 3]) == [6, 7, 6, 7, END, 3], "an end that was begun is no end"
    assert written(params, [1, 6, 3]) == [1, 6, 6, 7, END, 3]


def test_the_budget_is_for_all_blocks_together():
    params = ThinkingParams(end_ids=(END,), start_ids=(START,), max_tokens=3)
    assert written(params, [START, 1, END, 2, START, 3, 4]) == [START, 1, END, 2, START, 3, END, 4]


@given(
    wanted=st.lists(st.integers(5, 10), max_size=40),
    ends=st.lists(st.integers(5, 10), min_size=1, max_size=3),
    max_tokens=st.integers(0, 6),
    is_open=st.booleans(),
)
def test_thinking_never_takes_longer_than_budget_and_end(wanted, ends, max_tokens, is_open):
    params = ThinkingParams(end_ids=tuple(ends), start_ids=(5,), is_open=is_open, max_tokens=max_tokens)
    thinking, inside = Thinking(params), 0
    for token in written(params, wanted):
        was_inside = thinking._inside
        thinking.push(token)
        inside = inside + 1 if was_inside else 0
        assert inside <= max_tokens + len(ends)
