"""Incremental detokenization of one choice: tokens in, text out, never a part of a character.

Promises: constant work per token; all texts of `push` and `finish` joined are the text of the whole output. Must not
know: stop strings, HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from quire_server.text.tokenizer import TextTokenizer

_TAIL_TOKENS = 8  # last tokens of the prompt; an unfinished character has at most 3 bytes, so 3 tokens
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of the output as it grows. An incomplete character is held back until it is complete or cannot be.

    The text is that of prompt and output together less that of the prompt: an output that continues in the middle of a
    text keeps its leading space, and one that completes the prompt's last character begins with that character.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_ids: Collection[int] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`shown_ids`: special tokens that are not skipped, because a parser needs them.

        `prompt_ids` may be the whole prompt; only its end and whether it has any text matter.
        """
        self._skipped = tokenizer.special_ids.difference(shown_ids) if skip_special_tokens else frozenset()
        at_start = all(i in self._skipped for i in prompt_ids)
        tail = [i for i in prompt_ids[-_TAIL_TOKENS:] if i not in self._skipped]
        kind = _ByteText if tokenizer.joins_bytes else _WindowText
        self._text: _ByteText | _WindowText = kind(tokenizer, at_start, tail)

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        if len(ids) == 1:  # nearly always
            return "" if ids[0] in self._skipped else self._text.step(ids[0])
        return "".join(self.push_each(ids))

    def push_each(self, ids: Sequence[int]) -> list[str]:
        """Return what `push` gives for each token: "" for one that is skipped or completes no character."""
        pieces = []
        for token_id in ids:
            pieces.append("" if token_id in self._skipped else self._text.step(token_id))
        return pieces

    def finish(self) -> str:
        """The rest of an incomplete character, as U+FFFD. Call once, at the end."""
        return self._text.flush()


class _ByteText:
    """The text of tokens whose bytes, one after the other, are the text."""

    def __init__(self, tokenizer: TextTokenizer, at_start: bool, tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._at_start = at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(b"".join(map(tokenizer.token_bytes, tail)))
        # The prompt's own text already shows its unfinished end as U+FFFD, so it must not be shown again.
        self._prompt_pending = bool(self._decoder.getstate()[0])

    def step(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        if self._at_start and raw:
            self._at_start = False
            raw = self._first_bytes(token_id, raw)
        text = self._decoder.decode(raw)
        return self._after_prompt(text) if self._prompt_pending else text

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        return self._after_prompt(text) if self._prompt_pending else text

    def _after_prompt(self, text: str) -> str:
        if text:
            self._prompt_pending = False
        return text.removeprefix(_REPLACEMENT)

    def _first_bytes(self, token_id: int, raw: bytes) -> bytes:
        """The sentencepiece style drops the space before a text's first word, as its decoder does."""
        if not self._tokenizer.drops_first_space or b" " not in raw:
            return raw
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class _WindowText:
    """The text of tokens from other decoders: a window of recent tokens is decoded to find what a token adds."""

    def __init__(self, tokenizer: TextTokenizer, at_start: bool, tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = [] if at_start else list(tail)
        self._shown = self._decode()

    def step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        if text.endswith(_REPLACEMENT) and len(self._window) < 2 * _TAIL_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode())

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        if len(self._window) >= _TAIL_TOKENS:
            self._window = self._window[-_TAIL_TOKENS // 2 :]
            text = self._decode()
        self._shown = text
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
