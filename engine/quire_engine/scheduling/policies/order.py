"""Who is served first, and so who enters first and who is preempted last: the order of groups.

Promises: a total order that never changes during a group's life, so that a preempted group keeps its place; that the
last are served in bounded time is the elder rule's work. Must not know: blocks, budgets, what is running.
"""

from __future__ import annotations

from typing import Protocol

from quire_engine.scheduling.sequence import Group


class OrderPolicy(Protocol):
    """Sorts groups; a smaller key goes first. Keys of two live groups must differ."""

    def key(self, group: Group) -> tuple[int, ...]: ...


class FirstComeFirstServed:
    """By arrival."""

    def key(self, group: Group) -> tuple[int, ...]:
        return (group.arrival,)


class ByClass:
    """Interactive groups before batch ones, within each class by another order."""

    def __init__(self, within: OrderPolicy) -> None:
        self._within = within

    def key(self, group: Group) -> tuple[int, ...]:
        return (int(group.is_batch), *self._within.key(group))


class PriorityOrder:
    """By (priority, arrival): lower numbers go first, equal ones in order of submission."""

    def key(self, group: Group) -> tuple[int, ...]:
        return (group.request.priority, group.arrival)
