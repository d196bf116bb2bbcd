"""Texts that a grammar forces, under tokenizers that would make other tokens of them or change them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire_engine.contract.grammar_vocabulary import GrammarVocabulary
from support import sample_tokenizers

SPECIAL = ["<think>", "</s>", "[INST]"]
TEXTS = [
    "a <think> b",
    "</s>[INST]<s>",
    "<h1>the</h1>",
    "cafe\u0301",  # a letter and its accent, which most normalizers join
    "\ufb01\u00bd\u2460",  # which those of compatibility replace
    "two words",
]


def forced(vocabulary: GrammarVocabulary, text: str) -> bytes:
    """What is written under a grammar of this text alone."""
    tokenizer = LLTokenizer(vocabulary.text, eos_token=vocabulary.end_ids or None)
    matcher = LLMatcher(tokenizer, f"start: {json.dumps(text, ensure_ascii=False)}", log_level=0)
    written = b""
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        token_id = next(each for each in range(tokenizer.vocab_size) if mask[each >> 3] >> (each & 7) & 1)
        written += tokenizer.decode_bytes([token_id])
        assert matcher.consume_token(token_id)
    return written


def with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<h1>", normalized=False)])  # no special one, but the library takes it for one
    return tokenizer


def composing(tokenizer: Tokenizer) -> Tokenizer:
    given = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), *given])
    return tokenizer


@pytest.mark.parametrize("change", [with_special, lambda made: composing(with_special(made))], ids=["plain", "NFKC"])
@pytest.mark.parametrize(
    "make", [sample_tokenizers.byte_level, sample_tokenizers.sentencepiece, sample_tokenizers.unigram]
)
def test_a_forced_text_is_written_to_the_letter(
    make: Callable[[], Tokenizer], change: Callable[[Tokenizer], Tokenizer]
):
    vocabulary = GrammarVocabulary(change(make()).to_str())
    for text in TEXTS:
        assert forced(vocabulary, text) == text.encode()


def test_special_tokens_are_written_by_id_alone():
    made = with_special(sample_tokenizers.byte_level())
    vocabulary = GrammarVocabulary(made.to_str())
    assert {name: vocabulary.special_ids[name] for name in SPECIAL} == {
        name: made.token_to_id(name) for name in SPECIAL
    }
    matcher = LLMatcher(LLTokenizer(vocabulary.text), f"start: {vocabulary.by_id('<think> /[<>a-z]+/')}", log_level=0)
    assert matcher.consume_token(made.token_to_id("<think>"))
    mask = matcher.compute_bitmask()
    assert not any(mask[i >> 3] >> (i & 7) & 1 for i in map(made.token_to_id, SPECIAL))


def test_merges_that_make_a_special_token_are_left_out():
    vocab = {each: i for i, each in enumerate(["<", "h", ">", "<h", "<h>", "<h>>", "\u0120"])}
    made = Tokenizer(models.BPE(vocab, [("<", "h"), ("<h", ">"), ("<h>", ">")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken("<h>", normalized=False)])
    vocabulary = GrammarVocabulary(made.to_str())
    assert Tokenizer.from_str(vocabulary.text).encode("<h>").ids == [vocab["<h"], vocab[">"]]
    assert forced(vocabulary, "<h>>") == b"<h>>"


@pytest.mark.parametrize(
    ("lark", "by_id"),
    [
        ("start: <think> x", "start: <[{}]> x"),
        (r'start: "<think> \" <think>" <think>', r'start: "<think> \" <think>" <[{}]>'),
        ("start: /<think>\\/<think>/ <think>", "start: /<think>\\/<think>/ <[{}]>"),
        ("start: a // <think>\na: <think> # <think>", "start: a // <think>\na: <[{}]> # <think>"),
        ("start: <[3]> <unknown>", "start: <[3]> <unknown>"),
    ],
)
def test_names_become_ids_outside_of_texts(lark: str, by_id: str):
    vocabulary = GrammarVocabulary(with_special(sample_tokenizers.byte_level()).to_str())
    assert vocabulary.by_id(lark) == by_id.format(vocabulary.special_ids["<think>"])


def test_the_end_of_a_text_is_known_by_name():
    assert GrammarVocabulary(sample_tokenizers.byte_level().to_str()).end_ids == [1]
    described: dict[str, Any] = json.loads(sample_tokenizers.byte_level().to_str())
    described["added_tokens"] = []
    assert GrammarVocabulary(json.dumps(described)).end_ids == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"model": 1}',
        "{",
        '{"model": {}, "added_tokens": [{}]}',
        '{"model": {"vocab": [1]}}',
        "[" * 99_999,
    ],
)
def test_what_is_no_tokenizer_is_a_value_error(text: str):
    with pytest.raises(ValueError, match=r"."):
        GrammarVocabulary(text)
