"""How much text one token can stand for: what can never fit is refused by its length, before it is tokenized.

Promises: a bound for every text, or none; there is none where the tokenizer may leave characters out or merge them
without end, as those do that know an unknown token or strip spaces. Must not know: limits, requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

_NFC_SHRINKS = 4  # characters of a text for one of its composed form, at most
_KEEP_ALL = frozenset({"ByteLevel", "Metaspace", "Digits"})


def longest_token(tokenizer: Tokenizer) -> int:
    """The most characters of a text that one token stands for; 0: there is no bound."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    model, normalizer, splitter = tokenizer.model, _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    if type(model).__name__ not in {"BPE", "Unigram"} or not _knows_all(tokenizer, vocabulary, normalizer, splitter):
        return 0
    if _strips(tokenizer.get_added_tokens_decoder().values()) or not _keeps_all(splitter):
        return 0
    return max(map(len, vocabulary), default=0) * _shrinks(normalizer)


def _state(part: Any) -> Mapping[str, Any] | None:
    """The library shows what a part is made of only in its pickled state, which is JSON."""
    return None if part is None else json.loads(part.__getstate__())


def _knows_all(
    tokenizer: Tokenizer,
    vocabulary: Mapping[str, int],
    normalizer: Mapping[str, Any] | None,
    splitter: Mapping[str, Any] | None,
) -> bool:
    """Whether every byte has its token, so that no character is unknown."""
    if _has(normalizer, "ByteLevel") or _has(splitter, "ByteLevel"):
        return all(char in vocabulary for char in pre_tokenizers.ByteLevel.alphabet())
    falls_back = bool(getattr(tokenizer.model, "byte_fallback", False))
    return falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _strips(added: Iterable[AddedToken]) -> bool:
    return any(token.lstrip or token.rstrip for token in added)


def _keeps_all(step: Mapping[str, Any] | None) -> bool:
    """Whether no character is lost where a text is split."""
    if step is None:
        return True
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Sequence":
        return all(map(_keeps_all, step["pretokenizers"]))
    return step["type"] in _KEEP_ALL


def _shrinks(step: Mapping[str, Any] | None) -> int:
    """By which factor a text may become shorter before it is split; 0: nobody knows."""
    if step is None:
        return 1
    match step["type"]:
        case "Sequence":
            factor = 1
            for each in step["normalizers"]:
                factor *= _shrinks(each)
            return factor
        case "NFC":
            return _NFC_SHRINKS
        case "Prepend" | "ByteLevel":
            return 1
        case "Replace":
            pattern = step["pattern"].get("String", "")
            return 1 if 0 < len(pattern) <= len(step["content"]) else 0
    return 0


def _has(step: Mapping[str, Any] | None, kind: str) -> bool:
    if step is None:
        return False
    parts = [*step.get("pretokenizers", ()), *step.get("normalizers", ())]
    return step["type"] == kind or any(_has(part, kind) for part in parts)
