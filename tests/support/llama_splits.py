"""How llama.cpp's llama-vocab.cpp cuts text into words, by the values of tokenizer.ggml.pre: one expression after
another."""

from __future__ import annotations

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OLD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = r"((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
_UPPER = r"((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"
_LEAD, _SLASHES = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": [rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"],
    "dbrx": [rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"],
    "glm4": [rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"],
    "qwen2": [rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}|{_TAIL}"],
    "deepseek-r1-qwen": [rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}|{_TAIL}"],
    "qwen35": [
        rf"{_CONTRACTIONS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-2": [_OLD],
    "starcoder": [r"\p{N}", _OLD],
    "tekken": [rf"{_LEAD}{_CASED}|{_LEAD}{_UPPER}|\p{{N}}|{_SLASHES}"],
    "gpt-4o": [rf"{_LEAD}{_CASED}{_CONTRACTIONS}?|{_LEAD}{_UPPER}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHES}"],
    "seed-coder": [
        rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
