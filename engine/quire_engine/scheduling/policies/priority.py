"""Priority classes: lower numbers go first, equal ones in order of submission.

Promises: nothing about waiting; that even the last class is served in bounded time is the elder rule's work.
Must not know: what the numbers mean.
"""

from __future__ import annotations

from quire_engine.scheduling.sequence import Group


class PriorityOrder:
    """Order by (priority, arrival)."""

    def key(self, group: Group) -> tuple[int, ...]:
        return (group.request.priority, group.arrival)
