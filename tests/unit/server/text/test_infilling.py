"""Prompts for the middle of a text, by the marks that models were trained with."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from quire_server.text.infilling import Infilling, Parts
from quire_server.text.tokenizer import TextTokenizer
from support.fake_tokenizer import load_tokenizer
from support.fim_tokenizers import QWEN, fim_tokenizer
from support.sample_tokenizers import byte_level, sentencepiece

FAMILIES = {
    "qwen": QWEN[:3],
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "glm": ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_suffix_middle(tmp_path, family):
    tokenizer = fim_tokenizer(tmp_path, FAMILIES[family])
    infilling = Infilling.of(tokenizer)
    ids = infilling.prompt(tokenizer, Parts(prefix="ab", suffix="yz", begun="c"))
    assert ids == [260, *b"ab", 261, *b"yz", 262, *b"c"]
    assert set(infilling.stop_ids) == {260, 261, 262}


def test_a_prefix_of_ids_and_an_empty_one(tmp_path):
    tokenizer = fim_tokenizer(tmp_path)
    infilling = Infilling.of(tokenizer)
    assert infilling.prompt(tokenizer, Parts(prefix=[1, 2], suffix="")) == [260, 1, 2, 261, 262]


def test_other_files_stand_before_it(tmp_path):
    tokenizer = fim_tokenizer(tmp_path)
    infilling = Infilling.of(tokenizer)
    parts = Parts(prefix="p", suffix="s", extras=(("a.py", "x"), ("b.py", "y")))
    files = [264, *b"repository\n", 265, *b"a.py\nx\n", 265, *b"b.py\ny\n", 265, *b"filename\n"]
    assert infilling.prompt(tokenizer, parts) == [*files, 260, *b"p", 261, *b"s", 262]
    assert {263, 264, 265} < set(infilling.stop_ids)


def test_without_marks_for_files_their_texts_stand_before_it(tmp_path):
    tokenizer = fim_tokenizer(tmp_path, QWEN[:3])
    parts = Parts(prefix="p", suffix="s", extras=(("a.py", "x"),))
    assert Infilling.of(tokenizer).prompt(tokenizer, parts) == [*b"x\n", 260, *b"p", 261, *b"s", 262]


def test_a_model_without_all_three_marks_cannot(tmp_path):
    assert Infilling.of(load_tokenizer()) is None
    assert Infilling.of(fim_tokenizer(tmp_path, QWEN[:2])) is None


def with_marks(tokenizer) -> TextTokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in FAMILIES["codellama"]])
    return TextTokenizer(tokenizer, config={}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_beginning_of_a_text_comes_once_and_no_space_is_put_into_it(make):
    tokenizer = with_marks(make())
    ids = Infilling.of(tokenizer).prompt(tokenizer, Parts(prefix="def f", suffix="(x):", begun="oo"))
    marks = [tokenizer.token_id(name) for name in FAMILIES["codellama"]]
    assert ids[:2] == [tokenizer.bos_token_id, marks[0]]
    assert ids.count(tokenizer.bos_token_id) == 1
    parts, part = [], b""
    for token_id in [*ids[2:], -1]:
        if token_id in (*marks, -1):
            parts.append(part)
            part = b""
        else:
            part += tokenizer.token_bytes(token_id)
    assert parts == [b"def f", b"(x):", b"oo"]
    bare = Infilling.of(tokenizer).prompt(tokenizer, Parts(prefix="a", suffix="b", add_special_tokens=False))
    assert bare[0] == marks[0]
