"""A delta of a choice as pieces in the order in which the model has said them, as far as anybody can tell.

Promises: every piece of the delta once; what is open goes on before what is new begins. Must not know: what becomes of
the pieces, any dialect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire_server.answering.choice import ChoiceDelta
from quire_server.text.parsing.calls import CallDelta


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    text: str


def pieces(
    delta: ChoiceDelta, *, open_call: int | None, is_answer_open: bool
) -> Iterator[Thought | Answer | CallDelta]:
    """The open call's first, or the open answer's; then thoughts, the answer and calls, of which none is empty text."""
    yield from (call for call in delta.calls if call.index == open_call)
    said: list[Thought | Answer] = [Thought(delta.reasoning), Answer(delta.text)]
    yield from (piece for piece in (reversed(said) if is_answer_open else said) if piece.text)
    yield from (call for call in delta.calls if call.index != open_call)
