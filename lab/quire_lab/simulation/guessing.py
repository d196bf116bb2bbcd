"""Guessed tokens in simulation: of a request's guesses as many are right as its load says, each if those before were.

Promises: the same request has the same right guesses at the same positions in every run. Must not know: clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from zlib import crc32

from quire_engine.contract.batch import SampledToken
from quire_engine.contract.drafts import Draft, Wish
from quire_lab.simulation.requests import LAST_TOKEN

_WRONG = -1  # a token that no request has
_MATCH = 9  # as if so many tokens of context spoke for each guess


class SimulatedDrafter:
    """See `drafts.Drafter`. A request's output repeats one token, which a right guess is."""

    is_costly = False

    def __init__(self, share_of: Callable[[int], float]) -> None:
        """`share_of`: the probability that a guess is right, by the token of the request."""
        self._share_of = share_of

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        return [self._guess(wish) for wish in wishes]

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        """Do nothing: this drafter learns nothing."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept."""

    def _guess(self, wish: Wish) -> Draft:
        token, first = wish.token_ids[-1], len(wish.token_ids)
        share = self._share_of(token)
        tokens = [
            token if crc32(b"%d %d" % (token, at)) < share * (1 << 32) else _WRONG
            for at in range(first, first + wish.most)
        ]
        return Draft(tuple(tokens), _MATCH)


def drawn(sample: tuple[SampledToken, ...], drafts: Sequence[int], num_left: int) -> tuple[SampledToken, ...]:
    """The samples behind these drafts of a request that repeats one, and is to get so many tokens yet."""
    right = sum(1 for _ in takewhile(lambda draft: draft == sample[0].token_id, drafts))
    if right + 1 < num_left:
        return sample * (right + 1)
    return sample * (num_left - 1) + LAST_TOKEN
