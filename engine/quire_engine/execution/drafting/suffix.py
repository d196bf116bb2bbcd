"""Drafts by the longest suffix of a sequence that occurred in it before: what followed it then may follow now.

The suffix is found through chains of places with the same last two tokens, as in LZ77 compressors (Deutsch, RFC 1951):
the newest places come first, and few of them are looked at. Where the last draft was right, its place goes on, so that
a long copy is followed past any number of newer places. `prompt_lookup` of vLLM, with n-grams, is the special case
of a bounded length. Promises: drafts follow from the tokens of the calls alone; memory is 4 bytes a token and an entry
for each pair of tokens. Must not know: the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire_engine.contract.drafts import NO_DRAFT, Draft, Wish

MOST_PLACES = 8  # earlier places that are compared
MOST_MATCH = 32  # tokens of a suffix that are compared: longer ones say no more
_SURE = 8  # tokens of a suffix behind which no other place is looked for, while its last draft was right


class Copied:
    """The place in the source behind a sequence's last match, and the sequence's length in tokens then."""

    __slots__ = ("end", "place")

    def __init__(self) -> None:
        self.place, self.end = -1, 0


class SuffixDrafter:
    """See `drafts.Drafter`."""

    is_costly = False

    def __init__(self, least: int = 2, most: int = MOST_MATCH) -> None:
        """`least` and `most`: tokens of a suffix."""
        self._bounds = max(least, 1), most
        self._chains: dict[int, tuple[Chains, Copied]] = {}
        self._predictions: dict[int, tuple[Chains, Copied]] = {}

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        return [self.guess(*wish) for wish in wishes]

    def guess(
        self,
        sequence_id: int,
        token_ids: Sequence[int],
        most: int,
        prediction: Sequence[int] = (),
        scope: str = "",  # noqa: ARG002 - nothing is noted
    ) -> Draft:
        """The draft of one wish."""
        known = self._chains.get(sequence_id)
        if known is None or known[0].is_of_another(token_ids):
            known = self._chains[sequence_id] = Chains(), Copied()
        chains, copied = known
        chains.extend(token_ids)
        found = chains.find(token_ids, token_ids, self._bounds, most, copied)
        if prediction:
            predicted, copied = self._predictions.setdefault(sequence_id, (Chains(), Copied()))
            predicted.extend(prediction)
            other = predicted.find(prediction, token_ids, self._bounds, most, copied)
            if other.token_ids and other.match >= found.match:
                return other._replace(is_predicted=True)
        return found

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        """Outputs of other sequences are no source here: see `OutputsDrafter`."""

    def forget(self, sequence_id: int) -> None:
        self._chains.pop(sequence_id, None)
        self._predictions.pop(sequence_id, None)


class Chains:
    """The places behind each pair of neighbouring tokens: the newest one, and for each the one before it."""

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

    def find(
        self, source: Sequence[int], token_ids: Sequence[int], bounds: tuple[int, int], most: int, copied: Copied
    ) -> Draft:
        """The tokens behind the longest suffix of `token_ids` in `source`, which was added.

        At the place where the last draft goes on, else at the newest. `copied` is the sequence's own; if it is of
        another source, its place is found to say nothing.
        """
        end, (least, longest) = len(token_ids), (bounds[0], min(bounds[1], len(token_ids)))
        best, found = least - 1, -1
        place = copied.place + end - copied.end if copied.place > 0 else 0
        if 0 < place < len(source):
            best, found = _better(source, place, token_ids, longest, (best, found))
        if best < min(_SURE, longest) and end > 1:
            place = self._newest.get((token_ids[-2], token_ids[-1]), -1)
            if source is token_ids and place == end:
                place = self._before[end]  # not the suffix itself
            for _ in range(MOST_PLACES):
                if place < 0 or best >= longest:
                    break
                best, found = _better(source, place, token_ids, longest, (best, found))
                place = self._before[place]
        copied.place, copied.end = found, end
        return NO_DRAFT if found < 0 else Draft(tuple(source[found : found + most]), best)


def _better(
    source: Sequence[int], place: int, token_ids: Sequence[int], longest: int, best: tuple[int, int]
) -> tuple[int, int]:
    """The longer one of two matches, with its place: `best`, and the one that ends before `place` of the source."""
    end, count = len(token_ids), 0
    most = min(longest, place)
    if best[0] >= most or source[place - best[0] - 1] != token_ids[end - best[0] - 1]:
        return best
    while count < most and source[place - count - 1] == token_ids[end - count - 1]:
        count += 1
    return (count, place) if count > best[0] else best
