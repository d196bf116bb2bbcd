"""Log-probabilities after which a search goes on as it was recorded.

Owns which beam each sequence of a search has. Promises: the same sequences continue the same beams, and the search ends
in the same step. Must not know: the recorded scores, which are in no log, nor why a beam was worth more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire_engine.simulation.contents import STOP, Contents
from quire_engine.types import TokenLogprobs


class RecordedBeams:
    """Of all searches in a log."""

    def __init__(self, steps: Iterable[Mapping[str, Any]], contents: Contents) -> None:
        self._contents = contents
        self._searched: dict[str, list[tuple[int, Sequence[int]]]] = defaultdict(list)  # (step, whom each continues)
        self._totals: Counter[tuple[str, int]] = Counter()  # what the beam of each sequence scores
        self._given_up: Counter[tuple[str, int]] = Counter()  # beams that a sequence has had before
        for step in steps:
            for name, parents in step["beams"]:
                self._searched[name].append((step["step_id"], parents))

    def offer(self, step: Mapping[str, Any], whose: tuple[str, int], width: int, position: int) -> TokenLogprobs:
        """What follows a sequence's beam when, now or after a preemption, all of the search have come so far."""
        name, lane = whose
        parents = next((given for step_id, given in self._searched[name] if step_id >= step["step_id"]), None)
        offers: list[tuple[int, float]] = []
        if parents is not None:
            for rank, heir in enumerate(_by_rank(parents)):
                if parents[heir] == lane:
                    beam = self._given_up[name, heir] + (heir != lane)
                    token_id = self._contents.output(name, heir, position, beam)
                    offers.append((token_id, float(-rank - self._totals[whose])))
        elif lane == 0 and any(end[0] == name and end[2] != "error" for end in step["ends"]):
            # As many as end, and as many that might go on: with fewer the search would fail.
            offers = [(STOP if rank < width else STOP + rank, -float(rank)) for rank in range(2 * width)]
        ids, logprobs = tuple(token_id for token_id, _ in offers), tuple(logprob for _, logprob in offers)
        return TokenLogprobs(token_id=0, logprob=0.0, rank=1, top_ids=ids, top_logprobs=logprobs)

    def note(self, step: Mapping[str, Any]) -> None:
        """A step's results are applied."""
        for name, parents in step["beams"]:
            for rank, lane in enumerate(_by_rank(parents)):
                self._totals[name, lane] = -rank
                self._given_up[name, lane] += parents[lane] != lane


def _by_rank(parents: Sequence[int]) -> list[int]:
    """An order in which the same sequences are given the same beams: first who keeps its own, then the others."""
    return sorted(range(len(parents)), key=lambda lane: (parents[lane] != lane, lane))
