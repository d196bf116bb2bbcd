"""The reply shapes of log-probabilities."""

from __future__ import annotations

import math

import pytest

from quire_engine.contract.types import TokenLogprobs
from quire_server.text.logprobs import LEAST, LogprobFormat, finite
from support.fake_tokenizer import load_tokenizer

AT = TokenLogprobs(token_id=97, logprob=-3.0, rank=7, top_ids=(98, 99), top_logprobs=(-0.5, -1.0))
NEVER = TokenLogprobs(token_id=97, logprob=-math.inf, rank=9, top_ids=(98,), top_logprobs=(-math.inf,))


def names(*, are_ids: bool = False) -> LogprobFormat:
    return LogprobFormat(load_tokenizer(), names_are_ids=are_ids)


@pytest.mark.parametrize(
    ("value", "shown"), [(-1.5, -1.5), (0.0, 0.0), (-math.inf, LEAST), (math.nan, LEAST), (-1e6, LEAST)]
)
def test_every_number_is_json(value: float, shown: float) -> None:
    assert finite(value) == shown


@pytest.mark.parametrize(("top", "shown"), [(0, []), (1, ["b"]), (2, ["b", "c"]), (5, ["b", "c"])])
def test_chat_shows_exactly_the_most_likely(top: int, shown: list[str]) -> None:
    [entry] = names().chat([AT], top)["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -3.0, [97])
    assert [other["token"] for other in entry["top_logprobs"]] == shown


def test_completions_show_the_chosen_one_too() -> None:
    arrays = names().completion([AT, AT], (), [0, 1], 1)
    assert [[*top.items()] for top in arrays["top_logprobs"]] == [[("a", -3.0), ("b", -0.5)]] * 2
    assert arrays["token_logprobs"] == [-3.0, -3.0]
    assert arrays["text_offset"] == [0, 1]


def test_a_prompts_first_token_has_no_number() -> None:
    arrays = names().completion([None, AT], [104, 97], [0, 1], 1)
    assert arrays["tokens"] == ["h", "a"]
    assert arrays["token_logprobs"] == [None, -3.0]
    assert arrays["top_logprobs"][0] is None


@pytest.mark.parametrize(("chosen", "shown"), [(97, "abc"), (98, "bc"), (99, "cb"), (100, "dbc")])
def test_the_chosen_token_is_first_and_the_others_follow_by_rank(chosen: int, shown: str) -> None:
    at = TokenLogprobs(token_id=chosen, logprob=-0.75, rank=2, top_ids=(98, 99), top_logprobs=(-0.5, -1.0))
    assert "".join(names().completion([at], (), [0], 2)["top_logprobs"][0]) == shown
    [entries] = names().prompt([at], 2)
    assert "".join(entry["decoded_token"] for entry in entries.values()) == shown
    assert [int(token) for token in entries] == [ord(char) for char in shown]


def test_the_chosen_token_keeps_its_name_among_those_that_read_alike() -> None:
    at = TokenLogprobs(token_id=0xC4, logprob=-1.0, rank=2, top_ids=(0xC3, 97), top_logprobs=(-0.5, -2.0))
    assert names().completion([at], (), [0], 2)["top_logprobs"] == [{"�": -1.0, "a": -2.0}]


def test_of_tokens_that_read_alike_the_likelier_keeps_the_name() -> None:
    """Halves of characters all read as one replacement character."""
    alike = TokenLogprobs(token_id=97, logprob=-3.0, rank=3, top_ids=(0xC3, 0xC4), top_logprobs=(-0.5, -1.0))
    assert names().completion([alike], (), [0], 2)["top_logprobs"] == [{"�": -0.5, "a": -3.0}]
    assert names(are_ids=True).completion([alike], (), [0], 2)["top_logprobs"] == [
        {"token_id:195": -0.5, "token_id:196": -1.0, "token_id:97": -3.0}
    ]


def test_prompt_logprobs_have_ranks() -> None:
    assert names().prompt([None, AT], 1) == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "97": {"logprob": -3.0, "rank": 7, "decoded_token": "a"},
        },
    ]


def test_impossible_tokens_are_clamped_everywhere() -> None:
    assert names().chat([NEVER], 1)["content"][0]["top_logprobs"][0]["logprob"] == LEAST
    assert names().completion([NEVER], (), [0], 1)["top_logprobs"] == [{"b": LEAST, "a": LEAST}]
    assert names().prompt([NEVER], 1)[0]["98"]["logprob"] == LEAST


def test_tokens_that_were_asked_for_come_last_and_once() -> None:
    asked = TokenLogprobs(
        token_id=97, logprob=-3.0, rank=7, top_ids=(98, 99), top_logprobs=(-0.5, -1.0),
        asked_ids=(100, 98, 97), asked_logprobs=(-math.inf, -0.5, -3.0),
    )  # fmt: skip
    [entry] = names().chat([asked], 1)["content"]
    assert [(each["token"], each["logprob"]) for each in entry["top_logprobs"]] == [
        ("a", -3.0), ("b", -0.5), ("d", LEAST),
    ]  # fmt: skip
    [top] = names().completion([asked], (), [0], 1)["top_logprobs"]
    assert top == {"a": -3.0, "b": -0.5, "d": LEAST}
    [shown] = names().prompt([asked], 1)
    assert shown is not None
    assert {token: each["rank"] for token, each in shown.items()} == {"97": 7, "98": 1, "100": None}
