"""Guessed next tokens of a sequence, and what makes them: the contract between the scheduler and its drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

MOST_DRAFTS = 5  # of one sequence in a step, if nothing else is said
_GPU_ROWS = 64


def most_drafted_rows(max_num_seqs: int) -> int:
    """Rows of a step with drafts on a GPU at most: for so many it has graphs, and room for the tokens chosen."""
    return max(max_num_seqs, min(_GPU_ROWS, max_num_seqs * (1 + MOST_DRAFTS)))


class Draft(NamedTuple):
    """Guessed tokens, and how many tokens of context speak for them."""

    token_ids: tuple[int, ...] = ()
    match: int = 0
    is_predicted: bool = False  # they are the client's own guess


NO_DRAFT = Draft()


class Wish(NamedTuple):
    """One sequence whose next tokens are to be guessed."""

    sequence_id: int
    token_ids: Sequence[int]  # all that are known; those of one sequence usually grow at their end alone
    most: int  # tokens to guess
    prediction: Sequence[int] = ()  # the client's own guess of the whole output, the same in every call for a sequence
    scope: str = ""  # only what was noted in the same one may be guessed from


class Drafter(Protocol):
    """Guesses next tokens. A wrong guess costs a row and changes nothing; the same calls give the same guesses."""

    is_costly: bool  # a call takes a share of a step's time, which right guesses have to earn; else microseconds

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        """The tokens that may follow, at most `most` of each wish, in the order of the wishes."""
        ...

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        """An output is complete; `token_ids` end with it."""
        ...

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        ...
