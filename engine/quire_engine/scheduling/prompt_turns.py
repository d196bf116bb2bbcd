"""Which prompts that are begun let others have the step's prompt tokens first.

Owns how many chunks each has had in a row. Promises: what nobody else takes goes to those that gave way, in the same
step; the elder's claim is not touched. Must not know: blocks, budgets, how large chunks are.

A prompt gives way, for one step, after `max_consecutive_chunks` chunks in a row while another is begun or waits that is
only behind it; batch work gives way to interactive prompts unless its share is due; under fair queueing a prompt gives
way to those of other tenants that wait and have not got more, and that are begun and have less left: both are charged
for already.
"""

from __future__ import annotations

from itertools import chain

from quire_engine.scheduling.classes import ClassShares
from quire_engine.scheduling.sequence import Group


class PromptTurns:
    """Looks at the prompts of a step before any of them gets its chunk."""

    def __init__(self, max_consecutive_chunks: int, classes: ClassShares, *, by_account: bool) -> None:
        self._limit = max_consecutive_chunks
        self._classes = classes
        self._by_account = by_account
        self._in_a_row: dict[Group, int] = {}  # the chunk with which a group enters is its first

    def first(self, prefilling: list[Group], waiting: list[Group]) -> list[Group]:
        """Those of the running prompts that do not give way, in their order."""
        if not prefilling or (len(prefilling) == 1 and not waiting):
            self._in_a_row.clear()
            return prefilling
        first = [group for group in prefilling if not self._gives_way(group, prefilling, waiting)]
        if self._limit:
            row = self._in_a_row
            self._in_a_row = dict.fromkeys(prefilling, 0) | {group: row.get(group, 1) + 1 for group in first}
        return first

    def _gives_way(self, group: Group, prefilling: list[Group], waiting: list[Group]) -> bool:
        is_over = self._limit and self._in_a_row.get(group, 1) >= self._limit
        if is_over and any(self._is_like(other, group) for other in chain(prefilling, waiting)):
            return True
        queues = [queue for queue in (prefilling, waiting) if queue]  # batch last in each
        if group.is_batch != self._classes.is_due:
            goes_before = any(queue[-1].is_batch if self._classes.is_due else not queue[0].is_batch for queue in queues)
            if goes_before:
                return True
        if not self._by_account:
            return False
        others = [other for other in prefilling if other.account is not group.account]
        if any(_tokens_left(other) < _tokens_left(group) for other in others):
            return True
        return any(other.account is not group.account and _promised(other) <= _promised(group) for other in waiting)

    def _is_like(self, other: Group, group: Group) -> bool:
        """Whether only their order says who of the two goes first."""
        is_same = other.account is group.account or not self._by_account
        return other is not group and other.is_batch == group.is_batch and is_same


def _tokens_left(group: Group) -> int:
    return sum(group.pending(sequence) for sequence in group.computing)


def _promised(group: Group) -> float:
    return 0.0 if group.account is None else group.account.promised
