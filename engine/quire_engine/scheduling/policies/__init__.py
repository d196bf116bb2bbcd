"""The scheduler's decisions, one small file each.

Promises: a policy reads groups and answers; it changes neither groups nor blocks.
Must not know: each other, the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire_engine.limits import SchedulerLimits, VictimName
from quire_engine.scheduling.policies.capacity import WholePrompt
from quire_engine.scheduling.policies.chunk import FixedChunk
from quire_engine.scheduling.policies.elder import ElderRule
from quire_engine.scheduling.policies.fair_queue import FairQueue
from quire_engine.scheduling.policies.itl import ItlTarget
from quire_engine.scheduling.policies.order import ByClass, FirstComeFirstServed, OrderPolicy, PriorityOrder
from quire_engine.scheduling.policies.prefix_first import DeficitLongestPrefix, LongestPrefix
from quire_engine.scheduling.policies.queue import AsOrdered, QueuePolicy
from quire_engine.scheduling.policies.victim import LeastLost, LongestRunning, LowestClass, VictimPolicy, Youngest
from quire_engine.scheduling.sequence import Sequence

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
    charge: Callable[[Mapping[Sequence, int]], None] | None = None  # is told each step's slices while anyone waits


def policies_for(limits: SchedulerLimits) -> Policies:
    """The policies that the settings name."""
    name = limits.scheduling_policy
    deficit = DeficitLongestPrefix() if name == "dlpm" else None
    queues: dict[str, QueuePolicy] = {"wfq": FairQueue(), "lpm": LongestPrefix()}
    return Policies(
        order=ByClass(PriorityOrder() if name == "priority" else FirstComeFirstServed()),
        queue=deficit or queues.get(name, AsOrdered()),
        charge=deficit.charge if deficit else None,
        victim=VICTIMS[limits.preemption_victim](),
        capacity=WholePrompt(),
        chunk=FixedChunk(limits.prefill_chunk),
        itl=ItlTarget(limits.itl_target),
        elder=ElderRule(limits.elder_age_steps),
    )
