"""The elder rule: why every accepted request finishes, and within how many steps.

Promises: `SchedulerLimits.wait_bound` holds whatever the other policies do, if the elder is kept until it ends.
Must not know: blocks, queues, the order in which others are served.

The scheduler's part: the elder is never preempted; it has first claim on `min_chunk` tokens of every step, on
slots for all its choices, and on blocks (all others' blocks can be taken, and its footprint fits the pool). So each
step either computes `min_chunk` of its tokens or brings every unfinished choice of it forward by one token, and it
ends within W = ceil((P + n G) / min_chunk) + G steps, a full recomputation included.

Why the bound holds: a group is overdue once it is older than A + W. From then on only the elder of that moment and
overdue groups that arrived earlier come before it, each at most once. The elder of that moment is one of those that
arrived earlier, or a younger one that was overdue first and so needs less than W. Together:
A + W (until overdue) + W (such an elder) + the sum of W over all earlier groups + W (its own).
"""

from __future__ import annotations

from collections.abc import Iterable

from quire_engine.scheduling.sequence import Group


class ElderRule:
    """Names the group whose progress is guaranteed: the overdue one of least arrival, else the one of least arrival."""

    def __init__(self, age_steps: int) -> None:
        self._age_steps = age_steps

    def choose(self, live: Iterable[Group], step: int) -> Group | None:
        """The next elder, of `live` in order of arrival; the caller keeps it until it ends."""
        oldest: Group | None = None
        for group in live:
            oldest = oldest or group
            if step - group.added_step > self._age_steps + group.work:
                return group
        return oldest
