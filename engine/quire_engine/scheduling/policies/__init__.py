"""The scheduler's decisions, one small file each.

Promises: a policy reads groups and answers; it changes neither groups nor blocks.
Must not know: each other, the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_engine.limits import SchedulerLimits
from quire_engine.scheduling.policies.capacity import WholePrompt
from quire_engine.scheduling.policies.chunk import FixedChunk
from quire_engine.scheduling.policies.elder import ElderRule
from quire_engine.scheduling.policies.itl import ItlTarget
from quire_engine.scheduling.policies.order import FirstComeFirstServed, OrderPolicy, PriorityOrder
from quire_engine.scheduling.policies.queue import AsOrdered, QueuePolicy
from quire_engine.scheduling.policies.victim import Youngest


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """One of each."""

    order: OrderPolicy
    queue: QueuePolicy
    victim: Youngest
    capacity: WholePrompt
    chunk: FixedChunk
    itl: ItlTarget
    elder: ElderRule


def policies_for(limits: SchedulerLimits) -> Policies:
    """The policies that the settings name."""
    return Policies(
        order=PriorityOrder() if limits.scheduling_policy == "priority" else FirstComeFirstServed(),
        queue=AsOrdered(),
        victim=Youngest(),
        capacity=WholePrompt(),
        chunk=FixedChunk(limits.prefill_chunk),
        itl=ItlTarget(limits.itl_target),
        elder=ElderRule(limits.elder_age_steps),
    )
