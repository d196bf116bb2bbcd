"""Makes one step's plan: who computes how many tokens, who enters, who is preempted.

Owns the elder. Promises: the step's budget, slots and blocks are never overdrawn; every running decode advances or is
preempted. Must not know: tokens' values, results, outputs.

One step, `Planner.plan`, shares out `max_num_batched_tokens` tokens:
 1. the elder stays the elder until it ends; then `ElderRule.choose` names the overdue group of least arrival;
 2. `Admission.seat`: an elder that waits enters, at the cost of as many others as it takes;
 3. `_serve_elder`: it gets its decodes, and tokens of its prompt up to `min_chunk` in all;
 4. `_serve_decodes`: every other running sequence that has one token to compute gets it;
 5. where streams run, `ItlTarget.prompt_tokens` limits what is left for the prompts;
 6. `_serve_prefills`: the running groups' unfinished prompts get chunks, the size of `FixedChunk`, but for those that
    `PromptTurns` lets give way;
 7. `Admission.admit`: waiting groups enter in the queue policy's order, with their first chunk, while slots, budget and
    blocks last; a group that cannot lets at most `max_bypasses` others pass; after a preemption nobody enters;
 8. `_give_rest`: what nobody took goes to the prompts;
 9. `Giving.give`, in all of these: blocks are reserved before tokens are given; where they are short, `Room` preempts
    the victim policy's choice, never the elder, or the group itself;
10. `Admission.note_kv_wait`: the group at the queue's head is accounted its wait for blocks.
"""

from __future__ import annotations

from quire_engine.limits import SchedulerLimits
from quire_engine.scheduling.accounts import Accounts
from quire_engine.scheduling.admission import Admission
from quire_engine.scheduling.classes import ClassShares
from quire_engine.scheduling.giving import Giving
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.policies import Policies
from quire_engine.scheduling.prompt_turns import PromptTurns
from quire_engine.scheduling.room import Room
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.step_plan import StepPlan
from quire_engine.scheduling.swapping import Swapping


class Planner:
    """Makes the plans of all steps, over one roster and one allocator."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policies: Policies,
        kv: KVAllocator,
        roster: Roster,
        swapping: Swapping | None = None,
    ) -> None:
        self.elder: Group | None = None
        self.step = 0  # the last one that was planned
        self._limits = limits
        self._policies = policies
        self._kv = kv
        self._roster = roster
        self.accounts = Accounts(of_everyone=limits.scheduling_policy == "wfq")
        self._classes = ClassShares(limits.batch_min_share)
        self._turns = PromptTurns(
            limits.max_consecutive_chunks, self._classes, by_account=limits.scheduling_policy == "wfq"
        )
        room = Room(limits, policies.victim, kv, roster, swapping)
        self._giving = Giving(policies.chunk, kv, room)
        self.admission = Admission(
            limits,
            queue=policies.queue,
            capacity=policies.capacity,
            giving=self._giving,
            room=room,
            kv=kv,
            roster=roster,
            classes=self._classes,
            accounts=self.accounts,
        )

    def plan(self, step: int, now: float) -> StepPlan:
        """The plan of step number `step`. Blocks are taken, groups moved; nothing else changes."""
        self.step = step
        last, self.elder = self.elder, self._elder(step)
        plan = StepPlan(self._limits.max_num_batched_tokens, self.elder)
        if self.elder is not None:
            if self.elder is not last:
                plan.note("elder", self.elder)
            self._serve_elder(self.elder, plan, now)
        prefilling = self._serve_decodes(plan)
        if prefilling or self._roster.waiting:
            plan.limit(self._policies.itl.prompt_tokens(plan.num_streams))
        num_partial = self._serve_prefills(prefilling, plan)
        if self._roster.waiting:
            prefilling += self.admission.admit(plan, num_partial, now)
        self._give_rest(prefilling, plan)
        self.admission.note_kv_wait(now)
        self.accounts.charge(plan)
        self._classes.note(plan, self._roster.running, self._roster.waiting)
        if self._policies.charge is not None and self._roster.waiting:
            self._policies.charge(plan.slices)
        self._kv.unpin()
        return plan

    def let_go(self, group: Group) -> None:
        """The group is about to be held: whose progress is guaranteed is somebody else."""
        if self.elder is group:
            self.elder = None

    def _elder(self, step: int) -> Group | None:
        if self.elder is None or self.elder.state == "finished":
            return self._policies.elder.choose(self._roster.contenders(), step)
        return self.elder

    def _serve_elder(self, elder: Group, plan: StepPlan, now: float) -> None:
        """The elder's decodes, then its first claim: `min_chunk` tokens in all, if it has as many to compute."""
        if elder.state != "running":
            self.admission.seat(elder, plan, now)
        self._giving.give_decodes(elder, plan)
        claim = self._limits.min_chunk - plan.planned(elder)
        for sequence in elder.computing:
            num_tokens = min(elder.pending(sequence), claim)
            if num_tokens > 0 and sequence not in plan.slices:
                claim -= num_tokens
                self._giving.give(sequence, num_tokens, plan)

    def _serve_decodes(self, plan: StepPlan) -> list[Group]:
        """One token for every running decode; returns the groups that have more than one token to compute."""
        return [
            group
            for group in list(self._roster.running)
            if group.state == "running" and self._giving.give_decodes(group, plan)
        ]

    def _serve_prefills(self, groups: list[Group], plan: StepPlan) -> int:
        """Chunks of unfinished prompts; returns how many groups but the elder stay in the middle of theirs."""
        for group in self._turns.first(groups, self._roster.waiting):
            if group.state == "running":
                self._giving.give_chunks(group, plan)
        others = [group for group in groups if group.state == "running" and group is not plan.elder]
        return sum(1 for group in others if self._giving.stays_partial(group, plan))

    def _give_rest(self, groups: list[Group], plan: StepPlan) -> None:
        """What others did not take of what long prompts left them. No block is needed: those came on entering."""
        for group in groups:
            if group.state == "running":
                self._giving.give_chunks(group, plan, others=False)
