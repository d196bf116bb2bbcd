"""Drafts by the longest suffix of a sequence that occurred in it before: what followed it then may follow now.

The suffix is found through chains of places with the same last two tokens, as in LZ77 compressors (Deutsch, RFC 1951):
the newest places come first, and few of them are looked at. `prompt_lookup` of vLLM, with n-grams, is the special case
of a bounded length. Promises: a draft follows from the tokens alone; memory is 4 bytes a token and an entry for each
pair of tokens. Must not know: the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire_engine.drafts import NO_DRAFT, Draft

MOST_PLACES = 16  # earlier places that are compared
MOST_MATCH = 32  # tokens of a suffix that are compared: longer ones say no more


class SuffixDrafter:
    """See `drafts.Drafter`."""

    def __init__(self, least: int = 2, most: int = MOST_MATCH) -> None:
        """`least` and `most`: tokens of a suffix."""
        self._least, self._most = max(least, 1), most
        self._chains: dict[int, _Chains] = {}
        self._predictions: dict[int, _Chains] = {}

    def draft(self, sequence_id: int, token_ids: Sequence[int], most: int, prediction: Sequence[int] = ()) -> Draft:
        chains = self._chains.get(sequence_id)
        if chains is None or chains.is_of_another(token_ids):
            chains = self._chains[sequence_id] = _Chains()
        chains.extend(token_ids)
        found = chains.find(token_ids, token_ids, (self._least, self._most), most)
        if prediction:
            predicted = self._predictions.setdefault(sequence_id, _Chains())
            predicted.extend(prediction)
            other = predicted.find(prediction, token_ids, (self._least, self._most), most)
            if other.token_ids and other.match >= found.match:
                return other._replace(is_predicted=True)
        return found

    def forget(self, sequence_id: int) -> None:
        self._chains.pop(sequence_id, None)
        self._predictions.pop(sequence_id, None)


class _Chains:
    """For each pair of neighbours the newest place behind it, and for each place the one before with the same pair."""

    __slots__ = ("_before", "_last", "_newest")

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], int] = {}
        self._before = array("i", (-1, -1))  # by the number of tokens before a place
        self._last = -1  # the last token that was added

    def is_of_another(self, token_ids: Sequence[int]) -> bool:
        """Whether what was added is not the beginning of these tokens, as after a beam or a rejected end."""
        known = len(self._before) - 1
        return known > len(token_ids) or (known > 1 and token_ids[known - 1] != self._last)

    def extend(self, token_ids: Sequence[int]) -> None:
        newest, before = self._newest, self._before
        for place in range(len(before), len(token_ids) + 1):
            pair = token_ids[place - 2], token_ids[place - 1]
            before.append(newest.get(pair, -1))
            newest[pair] = place
        if len(token_ids) > 1:
            self._last = token_ids[len(before) - 2]

    def find(self, source: Sequence[int], token_ids: Sequence[int], bounds: tuple[int, int], most: int) -> Draft:
        """The tokens behind the longest suffix of `token_ids` in `source`, which was added, at its newest place."""
        end, (least, longest) = len(token_ids), bounds
        best, found = least - 1, -1
        place = self._newest.get((token_ids[-2], token_ids[-1]), -1) if end >= 2 else -1
        if source is token_ids and place == end:
            place = self._before[end]  # not the suffix itself
        longest = min(longest, end)
        for _ in range(MOST_PLACES):
            if place < 0 or best >= longest:
                break
            count = 2
            while count < longest and count < place and source[place - count - 1] == token_ids[end - count - 1]:
                count += 1
            if count > best:
                best, found = count, place
            place = self._before[place]
        if found < 0:
            return NO_DRAFT
        return Draft(tuple(source[found : found + most]), best)
