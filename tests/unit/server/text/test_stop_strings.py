"""The stop matcher against a search of the whole text, over every way to cut it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.text.stop_strings import StopMatcher


def search(text: str, stops: list[str], include: bool, first_examined: int = 0) -> tuple[str, str | None]:
    """The definition: the stop complete earliest (after `first_examined` characters), ties by list order."""
    for end in range(first_examined + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def feed(matcher: StopMatcher, pieces: list[str], unexamined: int = 0) -> tuple[str, str | None]:
    shown, found = "", None
    for i, piece in enumerate(pieces):
        new, stop = matcher.push(piece, examine=i >= unexamined)
        shown += new
        found = found or stop
    return shown + matcher.finish(), found


texts = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)
pieces_lists = st.lists(st.text(alphabet="abc", max_size=6), max_size=12)


@given(pieces=pieces_lists, stops=stop_lists, include=st.booleans())
def test_any_cut_gives_the_result_of_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    assert feed(StopMatcher(stops, include), pieces) == search("".join(pieces), stops, include)


@given(pieces=pieces_lists, stops=stop_lists, include=st.booleans(), unexamined=st.integers(0, 12))
def test_stops_complete_before_min_tokens_do_not_count(
    pieces: list[str], stops: list[str], include: bool, unexamined: int
) -> None:
    first = len("".join(pieces[:unexamined]))
    expected = search("".join(pieces), stops, include, first)
    assert feed(StopMatcher(stops, include), pieces, unexamined) == expected


@given(text=texts, stops=stop_lists)
def test_holds_back_exactly_what_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for i, char in enumerate(text):
        new, stop = matcher.push(char)
        shown += new
        if stop is not None:
            break
        seen = text[: i + 1]
        starts = {s[:k] for s in stops for k in range(1, len(s))}
        held = max((len(start) for start in starts if seen.endswith(start)), default=0)
        assert shown == seen[: len(seen) - held]


@given(text=texts, stops=stop_lists)
def test_nothing_is_held_when_the_stop_is_included(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=True)
    shown = ""
    for i, char in enumerate(text):
        new, stop = matcher.push(char)
        shown += new
        assert shown == text[: i + 1]
        if stop is not None:
            break


def test_the_first_of_the_list_wins_a_tie() -> None:
    assert StopMatcher(["b", "ab"]).push("xaby") == ("xa", "b")
    assert StopMatcher(["ab", "b"]).push("xaby") == ("x", "ab")


def test_the_earliest_complete_match_wins_over_the_earliest_start() -> None:
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc")


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n") == ("one", None)
    assert matcher.push("\ntwo") == ("", "\n\n")
    assert matcher.matched == "\n\n"
    assert matcher.push("three") == ("", None)
    assert matcher.finish() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_time_is_linear_in_a_text_that_almost_stops_everywhere() -> None:
    def seconds(length: int) -> float:
        matcher = StopMatcher(["a" * 200 + "b"])
        start = time.process_time()
        for _ in range(length):
            matcher.push("a")
        return time.process_time() - start

    seconds(2_000)
    short, long = min(seconds(4_000) for _ in range(3)), min(seconds(32_000) for _ in range(3))
    assert long < 24 * short  # 8 when linear, 64 when quadratic
