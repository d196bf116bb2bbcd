"""A text has at least as many tokens as its length says."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from quire_server.text.tokenizer import TextTokenizer, longest_token
from support.sample_tokenizers import TEXT, byte_level, metaspace, sentencepiece, words


def composed() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


PIECES = [
    *TEXT,
    "two words" * 9,
    "<|im_start|>" * 5,
    " " * 30,
    "日本",
    "\u1f82" * 7,
    "α\u0313\u0300\u0345" * 9,
    "\u1100\u1161\u11a8" * 9,
]


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace, composed])
def test_the_bound_holds(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    text_tokenizer = TextTokenizer(tokenizer, config={}, special_tokens={})
    assert longest_token(tokenizer) > 0
    draw = random.Random(5)
    for _ in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randrange(6)))
        assert text_tokenizer.least_tokens(len(text)) <= len(text_tokenizer.encode(text, add_special_tokens=False))
    assert text_tokenizer.least_tokens(10**6) > 1000


def stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def splitting() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def cleaning() -> Tokenizer:
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("  ", " "), tokenizer.normalizer])
    return tokenizer


@pytest.mark.parametrize("make", [words, stripping, splitting, cleaning])
def test_where_characters_may_be_lost_there_is_no_bound(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    assert longest_token(tokenizer) == 0
    assert TextTokenizer(tokenizer, config={}, special_tokens={}).least_tokens(10**9) == 0
