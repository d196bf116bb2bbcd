"""Two classes of requests: interactive ones go first, batch work gets what is left and never less than its share.

Owns the account of what batch work has had of the last steps. Promises: nothing is done where there is no batch work;
a batch group is preempted for interactive ones only while batch has its share, and a bounded number of times.
Must not know: blocks, the order within a class.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile

from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.step_plan import StepPlan

WINDOW_STEPS = 128  # over about so many the share is kept
MAX_CLASS_PREEMPTIONS = 4  # of one group in its life: from then on it keeps its place until it ends


class ClassShares:
    """Who is asked first, by class; queues come in the order of `ByClass`, batch last."""

    def __init__(self, min_share: float) -> None:
        self.is_due = False  # batch work has had less than its share
        self._min_share = min_share
        self._all = 0.0  # useful tokens of the last steps, older ones count less
        self._batch = 0.0

    def parts(self, waiting: list[Group]) -> list[list[Group]]:
        """The queue by class, in the order in which classes are asked."""
        if not waiting or not waiting[-1].is_batch:
            return [waiting]
        middle = bisect_left(waiting, True, key=lambda group: group.is_batch)
        interactive, batch = waiting[:middle], waiting[middle:]
        return [batch, interactive] if self.is_due else [interactive, batch]

    def victims(self, group: Group, running: Sequence[Group], elder: Group | None) -> list[Group]:
        """The batch groups that may make room for a waiting group, the last that is served first; none for batch."""
        if self.is_due or group.is_batch:
            return []
        batch = takewhile(lambda other: other.is_batch, reversed(running))
        return [other for other in batch if other is not elder and other.num_class_preemptions < MAX_CLASS_PREEMPTIONS]

    def note(self, plan: StepPlan, running: list[Group], waiting: list[Group]) -> None:
        """Count what a step gives to whom. Tokens that are computed again are no use to anyone."""
        if not any(queue and queue[-1].is_batch for queue in (running, waiting)):
            self._all = self._batch = 0.0
            self.is_due = False
            return
        batch = total = 0
        for sequence, num_tokens in plan.slices.items():
            group = sequence.group
            start = sequence.num_computed
            useful = max(start + num_tokens - max(start, group.num_computed_before), 0)
            total += useful
            if group.is_batch:
                batch += useful
        keep = 1 - 1 / WINDOW_STEPS
        self._all = self._all * keep + total
        self._batch = self._batch * keep + batch
        self.is_due = self._batch < self._min_share * self._all
