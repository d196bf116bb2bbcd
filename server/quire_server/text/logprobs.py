"""Log-probabilities in the formats of chat, completions and prompt_logprobs.

Promises: every number is finite JSON (minus infinity becomes -9999); a chat token's bytes are its true bytes, also
where they are a part of a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from quire_engine.contract.types import TokenLogprobs
from quire_server.text.tokenizer import TextTokenizer

LEAST = -9999.0  # JSON has no infinities


class ChatTop(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatTop):
    top_logprobs: list[ChatTop]


class ChatContent(TypedDict):
    content: list[ChatToken]
    refusal: None


class CompletionArrays(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptEntry(TypedDict):
    logprob: float
    rank: int | None  # None for tokens that were requested by id, whose rank is not known
    decoded_token: str


class LogprobFormat:
    """Formats log-probabilities with one request's token names: texts, or "token_id:N", which are unique."""

    def __init__(self, tokenizer: TextTokenizer, *, names_are_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._names_are_ids = names_are_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._names_are_ids else self._tokenizer.token_text(token_id)

    def chat(self, positions: Sequence[TokenLogprobs], num_top: int) -> ChatContent:
        """Each token with exactly the `num_top` most likely ones; if others were requested, with itself and those."""
        content: list[ChatToken] = []
        for position in positions:
            own = {position.token_id: position.logprob} if position.asked_ids else {}
            listed = own | _alternatives(position, num_top)
            top = [self._chat_top(token_id, logprob) for token_id, logprob in listed.items()]
            content.append({**self._chat_top(position.token_id, position.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(
        self, positions: Sequence[TokenLogprobs | None], first_ids: Sequence[int], offsets: Sequence[int], num_top: int
    ) -> CompletionArrays:
        """Parallel lists; a top dict has the chosen token, the `num_top` most likely by rank, then requested ones.

        A None position (a prompt's first token, which has no prediction) takes its name from `first_ids`. `offsets`:
        the characters of text before each token.
        """
        return {
            "tokens": self.names(positions, first_ids),
            "token_logprobs": chosen(positions),
            "top_logprobs": self.tops(positions, num_top),
            "text_offset": [*offsets],
        }

    def names(self, positions: Sequence[TokenLogprobs | None], first_ids: Sequence[int]) -> list[str]:
        """The list `tokens`."""
        return [
            self.name(first_ids[index] if position is None else position.token_id)
            for index, position in enumerate(positions)
        ]

    def tops(self, positions: Sequence[TokenLogprobs | None], num_top: int) -> list[dict[str, float] | None]:
        """The list `top_logprobs`."""
        return [None if position is None else self._top(position, num_top) for position in positions]

    def _top(self, position: TokenLogprobs, num_top: int) -> dict[str, float]:
        # Of tokens with the same text the chosen one keeps the entry, else the likelier one.
        top: dict[str, float] = {self.name(position.token_id): finite(position.logprob)}
        for token_id, logprob in _alternatives(position, num_top).items():
            top.setdefault(self.name(token_id), finite(logprob))
        return top

    def prompt(self, positions: Sequence[TokenLogprobs | None], num_top: int) -> list[dict[str, PromptEntry] | None]:
        """One dict per prompt token from token id to its entry, the prompt's own first; None for the first token."""
        return [None if position is None else self._prompt_entries(position, num_top) for position in positions]

    def _prompt_entries(self, position: TokenLogprobs, num_top: int) -> dict[str, PromptEntry]:
        own = self._prompt_entry(position.token_id, position.logprob, position.rank)
        entries: dict[str, PromptEntry] = {str(position.token_id): own}
        for rank, (token_id, logprob) in enumerate(
            zip(position.top_ids[:num_top], position.top_logprobs, strict=False), start=1
        ):
            entries.setdefault(str(token_id), self._prompt_entry(token_id, logprob, rank))
        for token_id, logprob in zip(position.asked_ids, position.asked_logprobs, strict=True):
            entries.setdefault(str(token_id), self._prompt_entry(token_id, logprob, None))
        return entries

    def _prompt_entry(self, token_id: int, logprob: float, rank: int | None) -> PromptEntry:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self.name(token_id)}

    def _chat_top(self, token_id: int, logprob: float) -> ChatTop:
        return {
            "token": self.name(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def chosen(positions: Sequence[TokenLogprobs | None]) -> list[float | None]:
    """The list `token_logprobs`."""
    return [None if position is None else finite(position.logprob) for position in positions]


def _alternatives(position: TokenLogprobs, num_top: int) -> dict[int, float]:
    """The most likely tokens in order, then others that were requested by id."""
    found = dict(zip(position.top_ids[:num_top], position.top_logprobs, strict=False))
    asked = zip(position.asked_ids, position.asked_logprobs, strict=True)
    return found | {token_id: logprob for token_id, logprob in asked if token_id not in found}


def finite(logprob: float) -> float:
    """The value, or -9999 if it is less or NaN."""
    return logprob if logprob >= LEAST else LEAST
