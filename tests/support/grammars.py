"""Grammars asked in tests: whether a text is one that a model may write, with and without marks that are tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache

from llguidance import LLMatcher, LLTokenizer

from quire_engine.contract.grammar_vocabulary import GrammarVocabulary
from quire_engine.demo import demo_model_path

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]")


@dataclass(frozen=True)
class Vocabulary:
    """The embedded model's without its marks, and after it the marks as tokens that are not special."""

    marks: tuple[str, ...] = ()
    ids: dict[str, int] = field(default_factory=dict, compare=False)

    def token_id(self, mark: str) -> int | None:
        self.tokenizer()
        return self.ids.get(mark)

    def tokenizer(self) -> LLTokenizer:
        return _tokenizer(self)[0]

    def tokens(self, text: str, *, is_plain: bool = False) -> list[int]:
        """The ids of a text; `is_plain`: names of special tokens in it are text as well."""
        tokenizer, special = _tokenizer(self)
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        pieces = [text] if is_plain else re.split(f"({names})", text)
        return [
            token_id
            for i, piece in enumerate(pieces)
            for token_id in ([special[piece]] if i % 2 else tokenizer.tokenize_str(piece))
        ]


@cache
def _tokenizer(vocabulary: Vocabulary) -> tuple[LLTokenizer, dict[str, int]]:
    """The tokenizer, and the special tokens by name."""
    described = json.loads((demo_model_path() / "tokenizer.json").read_text("utf-8"))
    added = [token for token in described["added_tokens"] if token["content"] not in MARKS]
    # The embedded model has some of the marks itself: they make room for those that are asked for.
    vocab = {
        f"<unused {token_id}>" if text in MARKS else text: token_id
        for text, token_id in described["model"]["vocab"].items()
    }
    described["model"]["vocab"] = vocab
    first = max([*described["model"]["vocab"].values(), *(token["id"] for token in described["added_tokens"])]) + 1
    for token_id, mark in enumerate(vocabulary.marks, first):
        vocabulary.ids[mark] = token_id
        added.append({**described["added_tokens"][0], "id": token_id, "content": mark, "special": False})
    described["added_tokens"] = added
    known = GrammarVocabulary(json.dumps(described))
    return LLTokenizer(known.text, eos_token=known.end_ids), known.special_ids


TOKENS = Vocabulary(marks=MARKS)
SPELLED = Vocabulary()


def verdict(grammar: str, text: str | list[int], vocabulary: Vocabulary = TOKENS, *, is_plain: bool = False) -> str:
    """Says "whole", "part" of a longer text, or what is left where it breaks the grammar; masks and parser agree.

    `is_plain`: names of special tokens in the text are text as well. A text may come as its tokens.
    """
    tokenizer = vocabulary.tokenizer()
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = vocabulary.tokens(text, is_plain=is_plain) if isinstance(text, str) else text
    for position, token_id in enumerate(ids):
        mask = matcher.compute_bitmask()
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return tokenizer.decode_str(ids[position:])
        assert matcher.consume_token(token_id), matcher.get_error()
    return "whole" if matcher.is_accepting() else "part"
