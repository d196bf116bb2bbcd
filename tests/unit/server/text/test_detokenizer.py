"""Incremental text against the text of the whole sequence."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire_server.text.detokenizer import Detokenizer
from quire_server.text.tokenizer import TextTokenizer
from support import sample_tokenizers

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def wrap(tokenizer: Tokenizer) -> TextTokenizer:
    return TextTokenizer(tokenizer, config={}, special_tokens=NAMES)


BYTE_LEVEL = wrap(sample_tokenizers.byte_level())
SENTENCEPIECE = wrap(sample_tokenizers.sentencepiece())
METASPACE = wrap(sample_tokenizers.metaspace())
WORDS = wrap(sample_tokenizers.words())
TEXTS = st.text(alphabet="ab hello日本😀é\n", max_size=20)


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` in pieces of the given sizes, the rest as the last."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(ids[at : at + size])
        at += size
    return [*pieces, ids[at:]]


def run(detokenizer: Detokenizer, pieces: list[list[int]]) -> str:
    return "".join(map(detokenizer.push, pieces)) + detokenizer.finish()


@given(
    ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40),
    sizes=st.lists(st.integers(0, 4), max_size=12),
    skip=st.booleans(),
)
def test_byte_level_joins_to_the_whole_text_for_any_ids(ids: list[int], sizes: list[int], skip: bool) -> None:
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert run(Detokenizer(BYTE_LEVEL, skip_special_tokens=skip), cut(ids, sizes)) == whole


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
@given(text=TEXTS, sizes=st.lists(st.integers(0, 4), max_size=12), bos=st.booleans(), skip=st.booleans())
def test_text_comes_back_whole(tokenizer: TextTokenizer, text: str, sizes: list[int], bos: bool, skip: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=bos)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert run(Detokenizer(tokenizer, skip_special_tokens=skip), cut(ids, sizes)) == whole


@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, SENTENCEPIECE, METASPACE], ids=["byte_level", "sentencepiece", "metaspace"]
)
@given(text=TEXTS.filter(str.strip), at=st.integers(0, 30), bos=st.booleans(), skip=st.booleans())
def test_output_is_the_whole_less_the_prompt(
    tokenizer: TextTokenizer, text: str, at: int, bos: bool, skip: bool
) -> None:
    """Wherever the prompt ends; where that is inside a character, the output begins with the whole character."""
    ids = tokenizer.encode(text, add_special_tokens=bos)
    prompt, output = ids[:at], ids[at:]
    shown = Detokenizer(tokenizer, skip_special_tokens=skip).push(prompt)
    of_prompt = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert shown == of_prompt or "\ufffd" in of_prompt
    new = run(Detokenizer(tokenizer, skip_special_tokens=skip, prompt_ids=prompt), [output])
    assert shown + new == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
@given(text=TEXTS)
def test_no_delta_has_a_piece_of_a_character(tokenizer: TextTokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    deltas = detokenizer.push_each(tokenizer.encode(text, add_special_tokens=True))
    assert not any("\ufffd" in delta for delta in deltas)
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
def test_an_unfinished_character_is_held_and_flushed(tokenizer: TextTokenizer) -> None:
    raw = _tokens_of_bytes(tokenizer, "😀".encode())
    detokenizer = Detokenizer(tokenizer, prompt_ids=tokenizer.encode("hello", add_special_tokens=False))
    assert detokenizer.push(raw[:3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert Detokenizer(tokenizer).push_each(raw) == ["", "", "", "😀"]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
def test_a_prompt_that_ends_inside_a_character_leaks_nothing(tokenizer: TextTokenizer) -> None:
    raw = _tokens_of_bytes(tokenizer, "日".encode())
    hello = tokenizer.encode("hello the world", add_special_tokens=True)
    letter = _tokens_of_bytes(tokenizer, b"!")
    for split in (1, 2):
        prompt = [*hello, *raw[:split]]
        assert Detokenizer(tokenizer, prompt_ids=prompt).push_each([*raw[split:], *letter])[-2:] == ["日", "!"]
        assert run(Detokenizer(tokenizer, prompt_ids=prompt), [letter]) == "!"
        assert run(Detokenizer(tokenizer, prompt_ids=prompt), [[]]) == ""


def test_leading_space_is_dropped_only_where_the_text_starts() -> None:
    ids = SENTENCEPIECE.encode("hello world", add_special_tokens=False)
    assert SENTENCEPIECE.token_bytes(ids[0]) == b" hello"
    assert Detokenizer(SENTENCEPIECE).push(ids) == "hello world"
    assert Detokenizer(SENTENCEPIECE, prompt_ids=ids).push(ids) == " hello world"
    bos = [SENTENCEPIECE.bos_token_id or 0]
    assert Detokenizer(SENTENCEPIECE, prompt_ids=bos).push(ids) == "hello world"
    assert Detokenizer(SENTENCEPIECE, prompt_ids=bos, skip_special_tokens=False).push(ids) == " hello world"


def test_special_tokens_are_skipped_or_shown() -> None:
    end = BYTE_LEVEL.eos_token_ids[0]
    ids = [*BYTE_LEVEL.encode("hello", add_special_tokens=False), end]
    assert Detokenizer(BYTE_LEVEL).push(ids) == "hello"
    assert Detokenizer(BYTE_LEVEL, skip_special_tokens=False).push(ids) == "hello</s>"


def test_a_special_token_that_a_reader_looks_for_is_shown_and_no_other() -> None:
    bos, eos = (BYTE_LEVEL.token_id(token) for token in ("<s>", "</s>"))
    assert bos is not None
    assert eos is not None
    ids = [bos, *BYTE_LEVEL.encode("hello", add_special_tokens=False), eos]
    assert Detokenizer(BYTE_LEVEL, shown_ids=(eos,)).push(ids) == "hello</s>"
    assert Detokenizer(BYTE_LEVEL, shown_ids=(bos, eos), prompt_ids=[eos]).push(ids) == "<s>hello</s>"
    assert Detokenizer(BYTE_LEVEL, skip_special_tokens=False, shown_ids=(eos,)).push(ids) == "<s>hello</s>"


@given(ids=st.lists(st.integers(0, WORDS.vocab_size - 1), max_size=60), at=st.integers(0, 5))
def test_other_decoders_give_the_same_text(ids: list[int], at: int) -> None:
    prompt, output = ids[:at], ids[at:]
    expected = WORDS.decode(ids)[len(WORDS.decode(prompt)) :]
    assert run(Detokenizer(WORDS, prompt_ids=prompt), [[i] for i in output]) == expected


def test_the_work_per_token_does_not_grow() -> None:
    ids = BYTE_LEVEL.encode("the quick brown fox 日本 " * 2000, add_special_tokens=False)

    def seconds(count: int) -> float:
        detokenizer = Detokenizer(BYTE_LEVEL)
        start = time.process_time()
        for i in ids[:count]:
            detokenizer.push([i])
        return time.process_time() - start

    seconds(len(ids))
    short, long = min(seconds(2_000) for _ in range(3)), min(seconds(16_000) for _ in range(3))
    assert long < 24 * short  # 8 when linear, 64 when quadratic


def _tokens_of_bytes(tokenizer: TextTokenizer, raw: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([byte])] for byte in raw]
