"""Makes one step's plan: who computes how many tokens, who enters, who is preempted.

Owns the elder and the account of waiting for blocks. Promises: the step's budget, slots and blocks are never
overdrawn; every running decode advances or is preempted. Must not know: tokens' values, results, outputs.

One step, `Planner.plan`, shares out `max_num_batched_tokens` tokens:
 1. the elder stays the elder until it ends; then `ElderRule.choose` names the overdue group of least arrival;
 2. `_seat_elder`: an elder that waits enters, at the cost of as many others as it takes;
 3. `_serve_elder`: it gets its decodes, and tokens of its prompt up to `min_chunk` in all;
 4. `_serve_decodes`: every other running sequence that has one token to compute gets it;
 5. where streams run, `ItlTarget.prompt_tokens` limits what is left for the prompts;
 6. `_serve_prefills`: the running groups' unfinished prompts get chunks, the size of `FixedChunk`;
 7. `_admit`: waiting groups enter in order, with their first chunk, while slots, budget and blocks last; a group that
    cannot lets at most `max_bypasses` others pass; after a preemption nobody enters;
 8. `_give_rest`: what nobody took goes to the prompts;
 9. `_give`, in all of these: blocks are reserved before tokens are given; where they are short, `_make_room` preempts
    the youngest but the elder, or the group itself;
10. `_note_kv_wait`: the group at the queue's head is accounted its wait for blocks.
"""

from __future__ import annotations

from quire_engine.invariants import InvariantViolation
from quire_engine.limits import SchedulerLimits
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.policies import Policies
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_plan import StepPlan
from quire_engine.types import WaitReason


class Planner:
    """Makes the plans of all steps, over one roster and one allocator."""

    def __init__(self, limits: SchedulerLimits, policies: Policies, kv: KVAllocator, roster: Roster) -> None:
        self.elder: Group | None = None
        self.total_query_tokens = 0
        self.total_hit_tokens = 0
        self._limits = limits
        self._policies = policies
        self._kv = kv
        self._roster = roster
        self._kv_blocked: Group | None = None  # the queue's head, while it waits for blocks
        self._kv_blocked_since = 0.0

    def plan(self, step: int, now: float) -> StepPlan:
        """The plan of step number `step`. Blocks are taken, groups moved; nothing else changes."""
        plan = StepPlan(self._limits.max_num_batched_tokens)
        if self.elder is None or self.elder.state == "finished":
            self.elder = self._policies.elder.choose(self._roster.live.values(), step)
        if self.elder is not None:
            self._serve_elder(self.elder, plan, now)
        prefilling = self._serve_decodes(plan)
        if prefilling or self._roster.waiting:
            plan.limit(self._policies.itl.prompt_tokens(plan.num_streams))
        num_partial = self._serve_prefills(prefilling, plan)
        if self._roster.waiting:
            prefilling += self._admit(plan, num_partial, now)
        self._give_rest(prefilling, plan)
        self._note_kv_wait(now)
        return plan

    # ---- phases ---------------------------------------------------------------------------------------------------

    def _serve_elder(self, elder: Group, plan: StepPlan, now: float) -> None:
        """The elder's decodes, then its first claim: `min_chunk` tokens in all, if it has as many to compute."""
        if elder.state != "running":
            self._seat_elder(elder, plan, now)
        self._give_decodes(elder, plan)
        claim = self._limits.min_chunk - plan.planned(elder)
        for sequence in elder.computing:
            num_tokens = min(elder.pending(sequence), claim)
            if num_tokens > 0 and sequence not in plan.slices:
                claim -= num_tokens
                self._give(sequence, num_tokens, plan)

    def _serve_decodes(self, plan: StepPlan) -> list[Group]:
        """One token for every running decode; returns the groups that have more than one token to compute."""
        return [
            group
            for group in list(self._roster.running)
            if group.state == "running" and self._give_decodes(group, plan)
        ]

    def _serve_prefills(self, groups: list[Group], plan: StepPlan) -> int:
        """Chunks of unfinished prompts; returns how many groups but the elder stay in the middle of theirs."""
        for group in groups:
            if group.state == "running":
                self._give_chunks(group, plan)
        others = [group for group in groups if group.state == "running" and group is not self.elder]
        return sum(1 for group in others if self._stays_partial(group, plan))

    def _admit(self, plan: StepPlan, num_partial: int, now: float) -> list[Group]:
        """Let waiting groups enter in order; returns those that did.

        A group that cannot enter lets others pass, at most `max_bypasses` of them in its life, and no more than so
        many groups are looked past at a time. After a preemption nobody enters: what was freed is spoken for.
        """
        closed: WaitReason | None = "kv" if plan.num_preempted else None
        limit = self._limits.max_bypasses
        entered: list[Group] = []
        passed_over: list[Group] = []
        for group in list(self._roster.waiting):
            if closed is None and plan.budget == 0:
                closed = "budget"
            if closed is not None:
                group.wait_for(closed)
                continue
            obstacle = self._try_to_enter(group, plan, num_partial, now)
            if obstacle is not None:
                group.wait_for(obstacle)
                passed_over.append(group)
                if group.num_bypasses >= limit or len(passed_over) > limit:
                    closed = obstacle
                continue
            entered.append(group)
            num_partial += self._stays_partial(group, plan)
            for other in passed_over:
                other.be_bypassed()
                if other.num_bypasses >= limit:
                    closed = other.wait_reason
        return entered

    def _give_rest(self, groups: list[Group], plan: StepPlan) -> None:
        """What others did not take of what long prompts left them. No block is needed: those came on entering."""
        for group in groups:
            if group.state == "running":
                self._give_chunks(group, plan, others=False)

    # ---- giving tokens --------------------------------------------------------------------------------------------

    def _give_decodes(self, group: Group, plan: StepPlan) -> bool:
        """One token for each sequence that has just one left; True if any has more."""
        has_more = False
        for sequence in group.computing:
            pending = group.pending(sequence)
            if pending > 1:
                has_more = True
            elif sequence not in plan.slices and not self._give(sequence, 1, plan):
                return False
        return has_more

    def _give_chunks(self, group: Group, plan: StepPlan, *, others: bool = True) -> None:
        """A chunk of each unfinished prompt; `others`: more may want a part of the step."""
        for sequence in group.computing:
            planned = plan.slices.get(sequence, 0)
            pending = group.pending(sequence) - planned
            if pending == 0:
                continue
            size = self._policies.chunk.size(pending=pending, planned=planned, budget=plan.budget, others=others)
            if size > 0 and not self._give(sequence, size, plan):
                return

    def _give(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Plan tokens of a sequence and take the blocks to write them; False if its group was preempted instead."""
        end = sequence.num_computed + plan.slices.get(sequence, 0) + num_tokens
        cost = self._kv.reserve_cost(sequence, end)
        if cost > self._kv.num_available and not self._make_room(sequence.group, cost, plan):
            return False
        plan.give(sequence, num_tokens, self._kv.reserve(sequence, end))
        return True

    def _stays_partial(self, group: Group, plan: StepPlan) -> bool:
        """Whether the group will be in the middle of its known tokens after this step."""
        if any(group.pending(sequence) > plan.slices.get(sequence, 0) for sequence in group.computing):
            return True
        return any(follower.num_output_tokens > 0 for follower in group.followers())

    # ---- entering -------------------------------------------------------------------------------------------------

    def _try_to_enter(self, group: Group, plan: StepPlan, num_partial: int, now: float) -> WaitReason | None:
        """Run the group and give it its first tokens, or say why not."""
        limits = self._limits
        if self._roster.num_running + len(group.sequences) > limits.max_num_seqs:
            return "slots"
        matched = self._match(group)
        leader = group.leader
        pending = group.pending(leader) - len(matched) * limits.block_size
        first = self._policies.chunk.size(pending=pending, planned=0, budget=plan.budget, others=True)
        goes_on = first < pending or any(follower.num_output_tokens > 0 for follower in group.followers())
        if plan.budget < min(pending, limits.min_chunk):
            return "budget"
        if goes_on and num_partial >= limits.max_num_partial_prefills:
            return "budget"
        need = self._kv.seat_cost(leader, matched) + group.blocks_beside_leader()
        if not self._policies.capacity.fits(group, need=need, available=self._kv.num_available):
            return "kv"
        self._enter(group, matched, now)
        self._give_chunks(group, plan)
        return None

    def _seat_elder(self, elder: Group, plan: StepPlan, now: float) -> None:
        """Bring the elder in, at the cost of as many others as it takes."""
        while self._roster.num_running + len(elder.sequences) > self._limits.max_num_seqs:
            self._preempt_for_elder(plan)
        matched = self._match(elder)
        while self._kv.seat_cost(elder.leader, matched) > self._kv.num_available:
            self._preempt_for_elder(plan)
        self._enter(elder, matched, now)

    def _match(self, group: Group) -> list[int]:
        """The cached prefix that the group would enter with; at least one token is left to compute."""
        leader = group.leader
        return self._kv.match(leader, group.pending(leader) - 1) if group.reads_cache else []

    def _enter(self, group: Group, matched: list[int], now: float) -> None:
        if group.first_scheduled is None and group.reads_cache and self._limits.enable_prefix_caching:
            self.total_query_tokens += len(group.leader.token_ids)
            self.total_hit_tokens += len(matched) * self._limits.block_size
        self._roster.enter(group, matched, now)

    # ---- making room ----------------------------------------------------------------------------------------------

    def _make_room(self, group: Group, cost: int, plan: StepPlan) -> bool:
        """Preempt until `cost` blocks are available; False if the group itself had to go."""
        while cost > self._kv.num_available:
            if group is self.elder:
                self._preempt_for_elder(plan)
                continue
            victim = self._policies.victim.choose(self._roster.running, self.elder) or group
            self._preempt(victim, plan)
            if victim is group:
                return False
        return True

    def _preempt_for_elder(self, plan: StepPlan) -> None:
        victim = self._policies.victim.choose(self._roster.running, self.elder)
        if victim is None:
            raise InvariantViolation("the elder is short of blocks or slots with nobody else running")
        self._preempt(victim, plan)

    def _preempt(self, group: Group, plan: StepPlan) -> None:
        plan.take_back(group)
        self._roster.preempt(group)

    def _note_kv_wait(self, now: float) -> None:
        """Account the time that a group spends at the queue's head for want of blocks."""
        waiting = self._roster.waiting
        blocked = waiting[0] if waiting and waiting[0].wait_reason == "kv" else None
        if blocked is self._kv_blocked:
            return
        if self._kv_blocked is not None:
            self._kv_blocked.note_kv_wait(now - self._kv_blocked_since)
        self._kv_blocked, self._kv_blocked_since = blocked, now
