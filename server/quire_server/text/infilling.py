"""Fill in the middle: prompts with the model's special tokens around prefix, suffix and middle.

Promises: a model without such tokens is not supported, whatever its name; the parts are tokenized separately, as in
training, so that no token crosses a mark. Must not know: requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire_server.text.tokenizer import TextTokenizer

# The marks before the prefix, before the suffix, and before the middle.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
# Further tokens that end the middle.
_ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>", "<|endoftext|>", "<|file_separator|>"),
    *("<|repo_name|>", "<reponame>", "<repo_name>", "<|file_sep|>", "<file_sep>"),
)
_FILE = ("<|file_sep|>", "<file_sep>")
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The text around the middle."""

    prefix: str | Sequence[int]
    suffix: str
    begun: str = ""  # the beginning of the middle
    extras: Sequence[tuple[str, str]] = ()  # other files as (name, text)
    add_special_tokens: bool = True

    @property
    def size(self) -> int:
        """Characters or ids."""
        return self.num_chars + (0 if isinstance(self.prefix, str) else len(self.prefix))

    @property
    def num_chars(self) -> int:
        """Characters of the parts that are text."""
        prefix = len(self.prefix) if isinstance(self.prefix, str) else 0
        return prefix + len(self.suffix) + len(self.begun) + sum(len(text) for _, text in self.extras)


@dataclass(frozen=True, slots=True, kw_only=True)
class Infilling:
    """A model's special tokens for infilling."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None  # before the name of a repository
    file: int | None  # before each file's name
    stop_ids: tuple[int, ...]  # tokens that end the middle

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Infilling | None:
        """The model's tokens; None if it was not trained for infilling."""
        for marks in _MARKS:
            prefix, suffix, middle = (tokenizer.token_id(mark) for mark in marks)
            if prefix is None or suffix is None or middle is None:
                continue
            ends = (tokenizer.token_id(end) for end in _ENDS)
            return cls(
                prefix=prefix,
                suffix=suffix,
                middle=middle,
                repository=_first(tokenizer, _REPOSITORY),
                file=_first(tokenizer, _FILE),
                stop_ids=(prefix, suffix, middle, *(end for end in ends if end is not None)),
            )
        return None

    def prompt(self, tokenizer: TextTokenizer, parts: Parts) -> list[int]:
        """Other files, prefix, suffix, then the beginning of the middle. Raises BadRequest."""
        ids = _beginning(tokenizer) if parts.add_special_tokens else []
        if parts.extras and self.file is not None:
            if self.repository is not None:
                ids += [self.repository, *_inside(tokenizer, "repository\n")]
            for name, text in parts.extras:
                ids += [self.file, *_inside(tokenizer, f"{name}\n{text}\n")]
            ids += [self.file, *_inside(tokenizer, "filename\n")]
        else:
            ids += _inside(tokenizer, "".join(f"{text}\n" for _, text in parts.extras))
        before = _inside(tokenizer, parts.prefix) if isinstance(parts.prefix, str) else parts.prefix
        ids += [self.prefix, *before, self.suffix, *_inside(tokenizer, parts.suffix), self.middle]
        return ids + _inside(tokenizer, parts.begun)


def _beginning(tokenizer: TextTokenizer) -> list[int]:
    """The special token with which the tokenizer begins every text, if any."""
    return [i for i in tokenizer.encode("", add_special_tokens=True)[:1] if i == tokenizer.bos_token_id]


def _inside(tokenizer: TextTokenizer, text: str) -> list[int]:
    """A text after a mark: without special tokens, and without the space that some tokenizers add before a text."""
    if not tokenizer.drops_first_space:
        return tokenizer.encode(text, add_special_tokens=False)
    # A line feed is a token of its own in these vocabularies, and no space is added to the text after it.
    before, whole = (tokenizer.encode(each, add_special_tokens=False) for each in ("\n", "\n" + text))
    return whole[len(before) :] if whole[: len(before)] == before else tokenizer.encode(text, add_special_tokens=False)


def _first(tokenizer: TextTokenizer, names: Sequence[str]) -> int | None:
    return next((i for i in map(tokenizer.token_id, names) if i is not None), None)
