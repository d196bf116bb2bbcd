"""Blocks and slots for groups that need them now, at the cost of those that are served last.

Promises: the elder is never preempted; what a victim was given in this step is taken back whole.
Must not know: chunks, the queue policy, why a group needs what it needs.
"""

from __future__ import annotations

from typing import Literal

from quire_engine.invariants import InvariantViolation
from quire_engine.limits import SchedulerLimits
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.policies.victim import VictimPolicy
from quire_engine.scheduling.prefix_match import PrefixMatch
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.step_plan import StepPlan
from quire_engine.scheduling.swapping import Swapping

# Who needs what the victim has: a running group that grows, the elder, or an interactive group.
PreemptionCause = Literal["blocks", "elder", "class"]


class Room:
    """Makes room by preempting running groups, the victim policy's choice one after the other."""

    def __init__(
        self,
        limits: SchedulerLimits,
        victim: VictimPolicy,
        kv: KVAllocator,
        roster: Roster,
        swapping: Swapping | None = None,
    ) -> None:
        self._limits = limits
        self._victim = victim
        self._kv = kv
        self._roster = roster
        self._swapping = swapping  # None: whoever is preempted is computed again

    def make_blocks(self, group: Group, cost: int, plan: StepPlan) -> bool:
        """Preempt until `cost` blocks are available; False if the running group itself had to go."""
        while cost > self._kv.num_available:
            if group is plan.elder:
                self._preempt_for_elder(plan)
                continue
            victim = self._victim.choose(self._roster.running, plan.elder) or group
            self._preempt(victim, "blocks", plan)
            if victim is group:
                return False
        return True

    def make_seat(self, elder: Group, plan: StepPlan) -> None:
        """Preempt until the waiting elder finds slots for its sequences."""
        while self._roster.num_running + len(elder.sequences) > self._limits.max_num_seqs:
            self._preempt_for_elder(plan)

    def make_seat_blocks(self, elder: Group, match: PrefixMatch, plan: StepPlan) -> None:
        """Preempt until the waiting elder can be seated with what it matched."""
        while self._kv.seat_cost(elder.leader, match) > self._kv.num_available:
            self._preempt_for_elder(plan)

    def make_for_class(self, victim: Group, plan: StepPlan) -> None:
        """Preempt a batch group for an interactive one that waits."""
        victim.note_class_preemption()
        self._preempt(victim, "class", plan)

    def _preempt_for_elder(self, plan: StepPlan) -> None:
        victim = self._victim.choose(self._roster.running, plan.elder)
        if victim is None:
            raise InvariantViolation("the elder is short of blocks or slots with nobody else running")
        self._preempt(victim, "elder", plan)

    def _preempt(self, group: Group, cause: PreemptionCause, plan: StepPlan) -> None:
        copied_from = plan.take_back(group)
        self._kv.void_copies(group.sequences, copied_from.keys())
        is_kept = self._swapping is not None and self._swapping.swap_out(group, copied_from)
        num_kept = (
            sum(sequence.swapped.num_tokens for sequence in group.sequences if sequence.swapped) if is_kept else 0
        )
        plan.note("preempted", group, reason=cause, num_tokens=num_kept)
        self._roster.preempt(group, is_kept=is_kept)
