"""First come, first served.

Promises: the order of submission.
Must not know: priorities.
"""

from __future__ import annotations

from quire_engine.scheduling.sequence import Group


class FirstComeFirstServed:
    """Order by arrival."""

    def key(self, group: Group) -> tuple[int, ...]:
        return (group.arrival,)
