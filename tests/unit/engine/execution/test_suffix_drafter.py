"""Drafts by an earlier place of the same words, against a search of all places, as sequences grow and change."""

from __future__ import annotations

import random

import pytest

from quire_engine.contract.drafts import NO_DRAFT, Draft, Wish
from quire_engine.execution.drafting.outputs import OutputsDrafter
from quire_engine.execution.drafting.suffix import MOST_MATCH, MOST_PLACES, SuffixDrafter


def searched(tokens: list[int], most: int, followed: int = 0) -> tuple[tuple[int, ...], int, int]:
    """The longest suffix: where the last draft goes on, or among the newest places of its last two tokens.

    Of equal ones the first of these. Returns the draft, the match and the place.
    """
    end = len(tokens)
    places = [place for place in range(end - 1, 1, -1) if tokens[place - 2 : place] == tokens[end - 2 :]]
    best, found = 1, -1
    for place in [followed] * (0 < followed < end) + places[:MOST_PLACES]:
        count = 0
        while count < min(MOST_MATCH, place) and tokens[place - count - 1] == tokens[end - count - 1]:
            count += 1
        if count > best:
            best, found = count, place
        if place == followed and best >= 8:
            break
    return (tuple(tokens[found : found + most]), best, found) if found >= 0 else ((), 0, -1)


@pytest.mark.parametrize("words", [2, 5, 40])
def test_it_finds_what_a_search_of_all_places_finds(words: int) -> None:
    dice, drafter, tokens, found = random.Random(words), SuffixDrafter(), [], -1
    for _ in range(400):
        if dice.random() < 0.2 and len(tokens) > 40:  # what was said before
            at = dice.randrange(len(tokens) - 30)
            added = tokens[at : at + dice.randint(1, 30)]
        else:
            added = [dice.randrange(words) for _ in range(dice.randint(1, 4))]
        tokens += added
        draft, match, found = searched(tokens, 5, found + len(added) if found > 0 else 0)
        assert drafter.guess(7, tokens, 5)[:2] == (draft, match)


def test_a_long_copy_is_followed_past_the_newer_places_of_its_words() -> None:
    """Every other token is the same, so that its newest places say nothing; the drafts are right from the ninth on."""
    source = [x for i in range(60) for x in (1, 2, 100 + i % 7 + 10 * (i // 7))]
    drafter, right = SuffixDrafter(), 0
    for end in range(1, len(source)):
        draft = drafter.guess(1, [*source, *source[:end]], 3)
        right += draft.token_ids == tuple(source[end : end + 3])
    assert right > 0.8 * len(source)


def test_what_was_said_once_is_guessed_when_it_begins_again() -> None:
    text = [*range(100, 140), 7, 8, 9]
    assert SuffixDrafter().guess(1, [*text, 101, 102, 103], 4).token_ids == (104, 105, 106, 107)
    assert SuffixDrafter().guess(1, text, 4) == NO_DRAFT
    assert SuffixDrafter().guess(1, [5], 4) == NO_DRAFT
    assert SuffixDrafter().guess(1, [], 4) == NO_DRAFT


def test_a_sequence_with_another_past_begins_anew() -> None:
    drafter = SuffixDrafter()
    drafter.guess(1, [1, 2, 3, 4, 1, 2], 2)
    assert drafter.guess(1, [5, 6, 7, 5, 6], 2).token_ids == (7, 5)
    assert drafter.guess(1, [5, 6, 7, 5], 2) == NO_DRAFT
    drafter.forget(1)
    drafter.forget(1)
    assert not drafter._chains


def test_a_prediction_counts_as_long_as_it_matches_no_less() -> None:
    drafter, prediction = SuffixDrafter(), (7, 8, 9, 10, 11, 12)
    assert drafter.guess(1, [1, 2, 8, 9], 3, prediction) == Draft((10, 11, 12), 2, is_predicted=True)
    assert drafter.guess(2, [5, 8, 9, 6, 5, 8, 9], 2, prediction) == Draft((6, 5), 3)  # said before, at more length
    assert drafter.guess(3, [11, 12], 3, prediction) == NO_DRAFT  # nothing follows
    assert drafter.guess(4, [8], 3, prediction) == NO_DRAFT


@pytest.mark.parametrize("kind", [SuffixDrafter, OutputsDrafter])
def test_many_wishes_are_answered_as_one_by_one(kind: type[SuffixDrafter | OutputsDrafter]) -> None:
    dice, together, alone = random.Random(5), kind(), kind()
    tokens: dict[int, list[int]] = {sequence_id: [] for sequence_id in range(4)}
    for _ in range(100):
        for known in tokens.values():
            known += [dice.randrange(4) for _ in range(dice.randint(1, 3))]
        wishes = [Wish(sequence_id, known, dice.randint(1, 5), (1, 2, 3)) for sequence_id, known in tokens.items()]
        assert together.draft(wishes) == [alone.guess(*wish) for wish in wishes]
