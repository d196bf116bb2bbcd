"""The vocabulary that grammars are compiled with: a model's tokenizer.json in which text is nothing but text.

The library asks the tokenizer for the tokens of texts that a grammar forces. So the tokenizer must not turn a text that
looks like a special token into that token, nor change any character. Grammars name special tokens by id.
"""

from __future__ import annotations

import json
import re
from typing import Any

_HIDDEN = "\ufdd0"  # a noncharacter, in the names of special tokens: text does not have it
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of one byte, which pieces fall back to
# Normalizers that change characters; others, such as one for spaces, belong to the way in which tokens spell text.
_CHANGING = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Lowercase", "Strip", "StripAccents", "BertNormalizer")
# The names that the library would know as ends of a text, where the model's files name none.
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<eos>")
# Of a grammar in Lark: texts, expressions and comments, in which a name is text; and the name of a special token.
_PIECE = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?!/)(?:[^/\\\n]|\\.)+/|(?://|#)[^\n]*|(?P<name><[^<>\s\[][^<>\s]*>)')


class GrammarVocabulary:
    """A tokenizer.json as the library may read it, and the special tokens' ids by name."""

    def __init__(self, tokenizer: str) -> None:
        """`tokenizer`: the text of a tokenizer.json. Raises ValueError for one that is none."""
        try:
            described = json.loads(tokenizer)
            self.special_ids = _special_ids(described)
            _hide(described, {name: f"{name[0]}{_HIDDEN}{name[1:]}" for name in self.special_ids})
            described["normalizer"] = _unchanging(described.get("normalizer"))
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError("it describes no tokenizer") from error
        self.text = json.dumps(described, ensure_ascii=False)

    @property
    def end_ids(self) -> list[int]:
        """The id whose name says that it ends a text, for models whose files do not say; none where no name does."""
        found = [self.special_ids[name] for name in _ENDS if name in self.special_ids]
        return [max(found)] if found else []

    def by_id(self, grammar: str) -> str:
        """A client's Lark in which special tokens are named, such as <think>, with their ids instead of the names."""

        def numbered(found: re.Match[str]) -> str:
            token_id = self.special_ids.get(found["name"] or "")
            return found[0] if token_id is None else f"<[{token_id}]>"

        return _PIECE.sub(numbered, grammar)


def shown(message: str) -> str:
    """The library's message, with the names of special tokens as the model has them."""
    return message.replace(_HIDDEN, "")


def _special_ids(described: dict[str, Any]) -> dict[str, int]:
    """The tokens that the library takes for special ones, by name."""
    return {
        token["content"]: token["id"]
        for token in described.get("added_tokens") or ()
        if (token.get("special") or re.fullmatch(r"<.*>", token["content"], re.DOTALL))
        and token["content"]
        and not _BYTE.fullmatch(token["content"])
    }


def _hide(described: dict[str, Any], hidden: dict[str, str]) -> None:
    """Rename tokens wherever they are named, so that no text has their names and no merges make them."""
    for token in described.get("added_tokens") or ():
        token["content"] = hidden.get(token["content"], token["content"])
    model = described["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {hidden.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[hidden.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, hidden)]


def _makes(merge: str | list[str], hidden: dict[str, str]) -> bool:
    """Whether two pieces, in a list or with a space between them, are a hidden token or have one."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first + second in hidden or first in hidden or second in hidden


def _unchanging(normalizer: Any) -> Any:
    """The normalizer without what changes characters."""
    if not isinstance(normalizer, dict):
        return normalizer
    if normalizer.get("type") == "Sequence":
        kept = [found for each in normalizer["normalizers"] if (found := _unchanging(each)) is not None]
        return {**normalizer, "normalizers": kept}
    return None if normalizer.get("type") in _CHANGING else normalizer
