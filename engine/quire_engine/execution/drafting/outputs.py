"""Drafts by earlier outputs of the same scope, beside those by a sequence itself.

For requests that are answered again and again in the same words: JSON of one schema, a file in several versions. An
output is a source for requests of its scope alone, since the time that an answer takes tells what was guessed.
Promises: a bound on what is kept, of all scopes together; the scope that was used longest ago goes first. Must not
know: the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from quire_engine.contract.drafts import NO_DRAFT, Draft, Wish
from quire_engine.execution.drafting.suffix import MOST_MATCH, Chains, Copied, SuffixDrafter

MOST_TOKENS = 1 << 17  # that are kept, of all scopes; about 200 bytes each
HALF = 1 << 14  # tokens of one half of a scope: when the newer half is full, the older one goes
_BOUNDS = (3, MOST_MATCH)  # tokens of a suffix: pairs are found in every text
_END = -1  # of an output, which no draft reaches beyond


class OutputsDrafter:
    """See `drafts.Drafter`."""

    is_costly = False

    def __init__(self) -> None:
        self._own = SuffixDrafter()
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()
        self._copied: dict[int, tuple[Copied, Copied]] = {}  # by sequence: in the newer half, in the older one
        self.num_tokens = 0  # that are kept

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        return [self.guess(*wish) for wish in wishes]

    def guess(
        self, sequence_id: int, token_ids: Sequence[int], most: int, prediction: Sequence[int] = (), scope: str = ""
    ) -> Draft:
        """The draft of one wish."""
        own = self._own.guess(sequence_id, token_ids, most, prediction, scope)
        noted = self._scopes.get(scope)
        if noted is None or own.match >= MOST_MATCH:
            return own
        self._scopes.move_to_end(scope)
        if (copied := self._copied.get(sequence_id)) is None:
            copied = self._copied[sequence_id] = Copied(), Copied()
        other = noted.find(token_ids, most, copied)
        return other if other.match > own.match else own

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        if len(token_ids) < _BOUNDS[0]:
            return
        noted = self._scopes.setdefault(scope, _Scope())
        self._scopes.move_to_end(scope)
        self.num_tokens -= noted.num_tokens
        noted.add(token_ids)
        self.num_tokens += noted.num_tokens
        while self.num_tokens > MOST_TOKENS:
            self.num_tokens -= self._scopes.popitem(last=False)[1].num_tokens

    def forget(self, sequence_id: int) -> None:
        self._own.forget(sequence_id)
        self._copied.pop(sequence_id, None)


class _Scope:
    """The outputs of one scope in two halves: one that grows, and the one before it."""

    def __init__(self) -> None:
        self._halves: tuple[_Half, ...] = (_Half(),)

    @property
    def num_tokens(self) -> int:
        return sum(len(half.token_ids) for half in self._halves)

    def add(self, token_ids: Sequence[int]) -> None:
        kept = token_ids[-HALF + 1 :]
        if len(self._halves[0].token_ids) + len(kept) + 1 > HALF:
            self._halves = _Half(), self._halves[0]
        half = self._halves[0]
        half.token_ids += (*kept, _END)
        half.chains.extend(half.token_ids)

    def find(self, token_ids: Sequence[int], most: int, copied: tuple[Copied, Copied]) -> Draft:
        best = NO_DRAFT
        for half, place in zip(self._halves, copied, strict=False):
            found = half.chains.find(half.token_ids, token_ids, _BOUNDS, most, place)
            if found.match > best.match:
                best = found._replace(token_ids=tuple(takewhile(_END.__ne__, found.token_ids)))
        return best if best.token_ids else NO_DRAFT


class _Half:
    """Outputs one behind the other."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.chains = Chains()
