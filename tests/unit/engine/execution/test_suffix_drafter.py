"""Drafts by an earlier place of the same words, against a search of all places, as sequences grow and change."""

from __future__ import annotations

import random

import pytest

from quire_engine.drafts import NO_DRAFT, Draft
from quire_engine.execution.drafting.suffix import MOST_MATCH, MOST_PLACES, SuffixDrafter


def searched(tokens: list[int], most: int) -> tuple[tuple[int, ...], int]:
    """The longest suffix among the newest places of its last two tokens; of equal ones the newest."""
    end = len(tokens)
    places = [place for place in range(end - 1, 1, -1) if tokens[place - 2 : place] == tokens[end - 2 :]]
    best, found = 1, -1
    for place in places[:MOST_PLACES]:
        count = 2
        while count < min(MOST_MATCH, place) and tokens[place - count - 1] == tokens[end - count - 1]:
            count += 1
        if count > best:
            best, found = count, place
    return (tuple(tokens[found : found + most]), best) if found >= 0 else ((), 0)


@pytest.mark.parametrize("words", [2, 5, 40])
def test_it_finds_what_a_search_of_all_places_finds(words: int) -> None:
    dice, drafter, tokens = random.Random(words), SuffixDrafter(), []
    for _ in range(300):
        tokens += [dice.randrange(words) for _ in range(dice.randint(1, 4))]
        assert drafter.draft(7, tokens, 5)[:2] == searched(tokens, 5)


def test_what_was_said_once_is_guessed_when_it_begins_again() -> None:
    text = [*range(100, 140), 7, 8, 9]
    assert SuffixDrafter().draft(1, [*text, 101, 102, 103], 4).token_ids == (104, 105, 106, 107)
    assert SuffixDrafter().draft(1, text, 4) == NO_DRAFT
    assert SuffixDrafter().draft(1, [5], 4) == NO_DRAFT
    assert SuffixDrafter().draft(1, [], 4) == NO_DRAFT


def test_a_sequence_with_another_past_begins_anew() -> None:
    drafter = SuffixDrafter()
    drafter.draft(1, [1, 2, 3, 4, 1, 2], 2)
    assert drafter.draft(1, [5, 6, 7, 5, 6], 2).token_ids == (7, 5)
    assert drafter.draft(1, [5, 6, 7, 5], 2) == NO_DRAFT
    drafter.forget(1)
    drafter.forget(1)
    assert not drafter._chains


def test_a_prediction_counts_as_long_as_it_matches_no_less() -> None:
    drafter, prediction = SuffixDrafter(), (7, 8, 9, 10, 11, 12)
    assert drafter.draft(1, [1, 2, 8, 9], 3, prediction) == Draft((10, 11, 12), 2, is_predicted=True)
    assert drafter.draft(2, [5, 8, 9, 6, 5, 8, 9], 2, prediction) == Draft((6, 5), 3)  # said before, at more length
    assert drafter.draft(3, [11, 12], 3, prediction) == NO_DRAFT  # nothing follows
    assert drafter.draft(4, [8], 3, prediction) == NO_DRAFT
