"""Where one choice's output stands in its grammar and in its thinking, and what may come next.

Promises: a function of the output's tokens alone, whoever asks and however often; what a grammar refuses, or costs too
much, is a GrammarError. Must not know: logits, rows, steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from quire_engine.execution.constrained.grammars import Grammars, first_line
from quire_engine.execution.constrained.thinking import Thinking
from quire_engine.execution.constrained.token_masks import Mask
from quire_engine.execution.constrained.vocabulary import GrammarError
from quire_engine.types import SamplingParams


class Follower:
    """One choice's."""

    def __init__(self, sampling: SamplingParams, grammars: Grammars | None) -> None:
        """Raises GrammarError."""
        if sampling.grammar and grammars is None:
            raise GrammarError("this engine follows no grammars")
        self._sampling = sampling
        self._tokens: tuple[int, ...] = ()  # as it was given them: equal tokens are then mostly the same objects
        self._ahead: list[int] = []  # behind those, one by one
        self._thinking = None if sampling.thinking is None else Thinking(sampling.thinking)
        self._matcher: LLMatcher | None = None
        if sampling.grammar and grammars is not None:
            self._matcher = grammars.matcher(sampling.grammar)

    def follows(self, sampling: SamplingParams, tokens: tuple[int, ...]) -> bool:
        """Whether it stands at the beginning of these tokens, or anywhere in them, of such a request."""
        mine, known, ahead = self._sampling, self._tokens, self._ahead
        if mine is not sampling and (mine.grammar != sampling.grammar or mine.thinking != sampling.thinking):
            return False
        if known is tokens:
            return not ahead
        middle = len(known)
        if ahead and tokens[middle : middle + len(ahead)] != tuple(ahead):
            return False
        return tokens[:middle] == known

    def stands_behind(self, sampling: SamplingParams, tokens: Sequence[int]) -> bool:
        """Whether nobody has to look: it was given these very tokens last, for this very request."""
        return self._tokens is tokens and self._sampling is sampling and not self._ahead

    def take(self, tokens: tuple[int, ...]) -> None:
        """Go on to the end of these tokens, which it `follows`. Raises GrammarError."""
        taken = len(self._tokens) + len(self._ahead)
        if len(tokens) > taken:
            for token_id in tokens[taken:]:
                self._push(token_id)
        self._tokens = tokens
        if self._ahead:
            self._ahead = []

    def take_one(self, token_id: int) -> None:
        """Go on by one token. Raises GrammarError."""
        self._push(token_id)
        self._ahead.append(token_id)

    @property
    def forced(self) -> int | None:
        """The only token that may come next, where that is known without a mask: whoever knows it need not compute.

        Raises GrammarError.
        """
        forced = None if self._thinking is None else self._thinking.forced
        if self._matcher is None:
            return forced
        if forced is not None:
            self._check_allows(forced)
            return forced
        # The mask has the first of these alone. What follows depends on how it is written on from there.
        ahead = self._matcher.compute_ff_tokens()
        self._check()
        return ahead[0] if ahead else None

    @property
    def ends_thinking(self) -> bool:
        """Whether the budget of thinking, and nothing else, decides what comes next."""
        return self._thinking is not None and self._thinking.forced is not None

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end may come."""
        return self._matcher is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the output may end here. Without a grammar it always may."""
        return self._matcher is None or self._matcher.is_accepting()

    def fill(self, bits: Mask, address: int, size: int) -> bool:
        """Write one bit for each id that may come next, the ids that end a text among them. False if all may.

        `address` is where `bits` lie, `size` how many bytes: to be asked for every row costs more than most masks.

        Raises GrammarError.
        """
        forced = None if self._thinking is None else self._thinking.forced
        if forced is not None:
            if self._matcher is not None:
                self._check_allows(forced)
            bits.fill(0)
            set_bits(bits.view(np.uint8).data, (forced,))
            return True
        if self._matcher is None:
            return False
        self._matcher.unsafe_compute_mask_ptr(address, size)
        self._check()
        return True

    def _push(self, token_id: int) -> None:
        if self._thinking is not None:
            self._thinking.push(token_id)
        if self._matcher is not None and not self._matcher.consume_token(token_id):
            self._check()
            raise GrammarError(f"the grammar does not allow token {token_id}")

    def _check(self) -> None:
        """After an error the library says that a text may end: nothing that it says may be used any more."""
        if self._matcher is not None and self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {first_line(self._matcher.get_error())}")

    def _check_allows(self, token_id: int) -> None:
        if self._matcher is not None and self._matcher.validate_tokens([token_id]) != 1:
            self._check()
            raise GrammarError("the grammar does not allow thinking to end where its budget is spent")


def set_bits(octets: memoryview, ids: tuple[int, ...]) -> None:
    """Allow ids that are within the vocabulary."""
    for token_id in ids:
        octets[token_id >> 3] |= 1 << (token_id & 7)


def clear_bits(octets: memoryview, ids: tuple[int, ...]) -> None:
    """Forbid ids that are within the vocabulary."""
    for token_id in ids:
        octets[token_id >> 3] &= 255 ^ (1 << (token_id & 7))
