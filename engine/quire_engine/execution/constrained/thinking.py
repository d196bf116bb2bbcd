"""How far a choice's thinking has come, and the token that ends it when its budget is spent.

Promises: a function of the tokens that were pushed, in order, and of nothing else.
Must not know: grammars, logits, text.
"""

from __future__ import annotations

from quire_engine.types import ThinkingParams


class Thinking:
    """One choice's. The budget is for all of its blocks together, should it begin another one."""

    def __init__(self, params: ThinkingParams) -> None:
        self._params = params
        self._inside = params.is_open
        self._num_thought = 0  # tokens inside, those of a block's end included
        self._num_forced = 0  # of the end of this block
        self._tail: list[int] = []  # the last tokens, as many as a start or an end has
        self._longest = max(len(params.start_ids), len(params.end_ids))

    @property
    def forced(self) -> int | None:
        """The token that has to be next; None: any."""
        params = self._params
        if not self._inside or self._num_thought < params.max_tokens or not params.end_ids:
            return None
        return params.end_ids[self._num_forced % len(params.end_ids)]

    def push(self, token_id: int) -> None:
        """The next token of the output."""
        params, tail = self._params, self._tail
        tail.append(token_id)
        del tail[: -self._longest]
        if not self._inside:
            self._inside = _ends_with(tail, params.start_ids)
            return
        if self._num_thought < params.max_tokens:
            self._num_thought += 1
        else:
            self._num_forced += 1
        if _ends_with(tail, params.end_ids):
            self._inside = False
            self._num_forced = 0


def _ends_with(tail: list[int], ids: tuple[int, ...]) -> bool:
    return bool(ids) and tail[-len(ids) :] == list(ids)
