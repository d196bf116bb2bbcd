"""Drafts by earlier outputs: of the same scope alone, at most so many, and never across the end of one."""

from __future__ import annotations

from quire_engine.contract.drafts import NO_DRAFT
from quire_engine.execution.drafting.outputs import HALF, MOST_TOKENS, OutputsDrafter

OUTPUT = tuple(range(100, 140))


def test_an_output_is_guessed_again_in_its_scope_alone() -> None:
    drafter = OutputsDrafter()
    drafter.note_end(OUTPUT, "a")
    assert drafter.guess(1, [7, *OUTPUT[:3]], 4, scope="a").token_ids == OUTPUT[3:7]
    assert drafter.guess(2, [7, *OUTPUT[:3]], 4, scope="b") == NO_DRAFT
    assert drafter.guess(3, [7, *OUTPUT[:3]], 4) == NO_DRAFT
    assert drafter.guess(4, [7, *OUTPUT[:2]], 4, scope="a") == NO_DRAFT, "two tokens are too few"


def test_no_draft_reaches_beyond_an_outputs_end() -> None:
    drafter = OutputsDrafter()
    drafter.note_end(OUTPUT, "a")
    drafter.note_end(OUTPUT[::-1], "a")
    assert drafter.guess(1, [7, *OUTPUT[-5:-2]], 4, scope="a").token_ids == OUTPUT[-2:]
    assert drafter.guess(1, [7, *OUTPUT], 4, scope="a") == NO_DRAFT
    drafter.note_end((1, 2), "c")
    assert drafter.guess(2, [1, 2], 4, scope="c") == NO_DRAFT


def test_the_sequence_itself_counts_as_long_as_it_matches_no_less() -> None:
    drafter = OutputsDrafter()
    drafter.note_end((1, 2, 3, 4, 5, 6), "a")
    assert drafter.guess(1, [2, 3, 4, 9, 2, 3, 4], 2, scope="a").token_ids == (9, 2)
    assert drafter.guess(2, [2, 3, 4, 9, 1, 2, 3, 4], 2, scope="a").token_ids == (5, 6)
    assert drafter.guess(3, [2, 3, 4], 2, (2, 3, 4, 8), scope="a").is_predicted


def test_newer_outputs_push_out_older_ones_of_their_scope() -> None:
    drafter = OutputsDrafter()
    for first in range(0, 1_000_000, 1000):
        drafter.note_end(range(first, first + 1000), "a")
        assert drafter.num_tokens <= 2 * HALF
    assert drafter.guess(1, [999_010, 999_011, 999_012], 2, scope="a").token_ids == (999_013, 999_014)
    assert drafter.guess(1, [10, 11, 12], 2, scope="a") == NO_DRAFT
    drafter.note_end(range(5 * HALF), "a")
    assert drafter.num_tokens <= 2 * HALF
    assert drafter.guess(1, [5 * HALF - 9, 5 * HALF - 8, 5 * HALF - 7], 1, scope="a").token_ids == (5 * HALF - 6,)


def test_the_scope_that_was_used_longest_ago_goes_first() -> None:
    drafter = OutputsDrafter()
    for number in range(2 * MOST_TOKENS // 1001):
        drafter.note_end(range(1000), f"{number}")
        assert drafter.guess(1, [10, 11, 12], 1, scope="0").token_ids == (13,), "it is used each time"
        assert drafter.num_tokens <= MOST_TOKENS
    assert drafter.guess(1, [10, 11, 12], 1, scope="1") == NO_DRAFT
    assert drafter.guess(1, [10, 11, 12], 1, scope=f"{number}").token_ids == (13,)


def test_an_ended_sequence_leaves_nothing() -> None:
    drafter = OutputsDrafter()
    drafter.note_end(OUTPUT, "a")
    drafter.guess(1, [7, *OUTPUT[:3]], 4, scope="a")
    drafter.forget(1)
    drafter.forget(1)
    assert not drafter._copied
