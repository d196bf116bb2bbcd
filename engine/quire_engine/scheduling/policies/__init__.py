"""The scheduler's decisions, one small file each.

Promises: a policy reads groups and answers; it changes neither groups nor blocks.
Must not know: each other, the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire_engine.limits import SchedulerLimits, VictimName
from quire_engine.scheduling.policies.capacity import WholePrompt
from quire_engine.scheduling.policies.chunk import FixedChunk
from quire_engine.scheduling.policies.elder import ElderRule
from quire_engine.scheduling.policies.fair_queue import FairQueue
from quire_engine.scheduling.policies.itl import ItlTarget
from quire_engine.scheduling.policies.order import ByClass, FirstComeFirstServed, OrderPolicy, PriorityOrder
from quire_engine.scheduling.policies.queue import AsOrdered, QueuePolicy
from quire_engine.scheduling.policies.victim import LeastLost, LongestRunning, LowestClass, VictimPolicy, Youngest

VICTIMS: Mapping[VictimName, type[VictimPolicy]] = {
    "youngest": Youngest,
    "longest-running": LongestRunning,
    "lowest-class": LowestClass,
    "least-lost": LeastLost,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """One of each."""

    order: OrderPolicy
    queue: QueuePolicy
    victim: VictimPolicy
    capacity: WholePrompt
    chunk: FixedChunk
    itl: ItlTarget
    elder: ElderRule


def policies_for(limits: SchedulerLimits) -> Policies:
    """The policies that the settings name."""
    return Policies(
        order=ByClass(PriorityOrder() if limits.scheduling_policy == "priority" else FirstComeFirstServed()),
        queue=FairQueue() if limits.scheduling_policy == "wfq" else AsOrdered(),
        victim=VICTIMS[limits.preemption_victim](),
        capacity=WholePrompt(),
        chunk=FixedChunk(limits.prefill_chunk),
        itl=ItlTarget(limits.itl_target),
        elder=ElderRule(limits.elder_age_steps),
    )
