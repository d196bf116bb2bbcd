"""Who is served first, and so who enters first: the order of groups.

Promises: a total order that never changes during a group's life, so that a preempted group keeps its place.
Must not know: blocks, budgets, what is running.
"""

from __future__ import annotations

from typing import Protocol

from quire_engine.scheduling.sequence import Group


class OrderPolicy(Protocol):
    """Sorts groups; a smaller key goes first. Keys of two live groups must differ."""

    def key(self, group: Group) -> tuple[int, ...]: ...
