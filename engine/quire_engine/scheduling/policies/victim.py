"""Who gives up its blocks when they run out.

Promises: never the elder; the caller preempts what is named here and asks again while blocks are short.
Must not know: why blocks or slots are short.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_engine.scheduling.sequence import Group


class Youngest:
    """The running group that is served last: the youngest, within the lowest class where there are classes."""

    def choose(self, running: Sequence[Group], elder: Group | None) -> Group | None:
        """One of `running` (in serving order) other than `elder`; None only if there is no other."""
        return next((group for group in reversed(running) if group is not elder), None)
