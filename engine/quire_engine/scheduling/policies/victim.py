"""Who gives up its blocks when they run out.

Promises: never the elder; the caller preempts what is named here and asks again while blocks are short.
Must not know: why blocks or slots are short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from quire_engine.scheduling.sequence import Group


class VictimPolicy(Protocol):
    """Names one of `running` (in serving order) other than `elder`; None only if there is no other."""

    def choose(self, running: Sequence[Group], elder: Group | None) -> Group | None: ...


class Youngest:
    """The running group that is served last: the youngest, within the lowest class where there are classes."""

    def choose(self, running: Sequence[Group], elder: Group | None) -> Group | None:
        return next((group for group in reversed(running) if group is not elder), None)


class LongestRunning:
    """The one that has run longest since it last entered: those that have just begun get their turn.

    Much is computed again for that; where outputs are long and nobody may keep its blocks for ever, it is what is asked
    for. The elder, which it would often name, goes on whatever is chosen.
    """

    def choose(self, running: Sequence[Group], elder: Group | None) -> Group | None:
        return min(_others(running, elder), key=lambda group: (group.entered_at, group.arrival), default=None)


class LowestClass:
    """Batch before interactive, then the largest number of priority, then who is served last."""

    def choose(self, running: Sequence[Group], elder: Group | None) -> Group | None:
        return max(
            _others(running, elder),
            key=lambda group: (group.is_batch, group.request.priority, group.arrival),
            default=None,
        )


class LeastLost:
    """The one that has least to compute again, so that the pool's shortage costs least; of equals the youngest."""

    def choose(self, running: Sequence[Group], elder: Group | None) -> Group | None:
        return min(_others(running, elder), key=lambda group: (_computed(group), -group.arrival), default=None)


def _others(running: Sequence[Group], elder: Group | None) -> Iterator[Group]:
    return (group for group in running if group is not elder)


def _computed(group: Group) -> int:
    """Tokens whose keys and values go; what choices share counts once."""
    longest = max(sequence.num_computed for sequence in group.sequences)
    return longest + sum(max(s.num_computed - group.num_prompt_tokens, 0) for s in group.sequences[1:])
