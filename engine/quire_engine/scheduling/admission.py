"""Lets waiting groups enter: in which order, with what they need, and why the others do not.

Owns the counts of cached prompt tokens and the account of waiting for blocks. Promises: slots, budget and blocks are
never overdrawn; no group is overtaken more than `max_bypasses` times. Must not know: results, outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire_engine.limits import SchedulerLimits
from quire_engine.scheduling.accounts import Accounts
from quire_engine.scheduling.classes import ClassShares
from quire_engine.scheduling.giving import Giving
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.policies.capacity import WholePrompt
from quire_engine.scheduling.policies.queue import QueuePolicy
from quire_engine.scheduling.prefix_match import NO_MATCH, PrefixMatch
from quire_engine.scheduling.room import Room
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.step_plan import StepPlan
from quire_engine.types import WaitReason


class Admission:
    """The door between the queue and those who run."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        queue: QueuePolicy,
        capacity: WholePrompt,
        giving: Giving,
        room: Room,
        kv: KVAllocator,
        roster: Roster,
        classes: ClassShares,
        accounts: Accounts,
    ) -> None:
        self.total_query_tokens = 0
        self.total_hit_tokens = 0
        self.total_saved_tokens = 0  # as the hits, and what preempted groups found again
        self._limits = limits
        self._queue = queue
        self._capacity = capacity
        self._giving = giving
        self._room = room
        self._kv = kv
        self._roster = roster
        self._classes = classes
        self._accounts = accounts
        self._kv_blocked: Group | None = None  # the queue's head, while it waits for blocks
        self._kv_blocked_since = 0.0
        self._kv_noted_at = 0.0
        self.total_kv_wait_seconds = 0.0

    def admit(self, plan: StepPlan, num_partial: int, now: float) -> list[Group]:
        """Let waiting groups enter in order; returns those that did.

        A group that cannot enter lets others pass, at most `max_bypasses` of them in its life, and no more than so
        many groups are looked past at a time. After a preemption nobody enters: what was freed is spoken for.
        """
        closed: WaitReason | None = "kv" if plan.num_preempted else None
        limit = self._limits.max_bypasses
        entered: list[Group] = []
        passed_over: list[Group] = []
        for group in self._by_class():
            if closed is None and plan.budget == 0:
                closed = "budget"
            if closed is not None:
                self._let_wait(group, closed, plan)
                continue
            if not self._accounts.has_seats(group, self._roster.running):
                self._let_wait(group, "slots", plan)  # its tenant's own doing: nobody bypasses it
                continue
            obstacle = self._try_to_enter(group, plan, num_partial, now)
            while obstacle in ("slots", "kv") and self._make_class_room(group, plan):
                obstacle = self._try_to_enter(group, plan, num_partial, now)
            if obstacle is not None:
                self._let_wait(group, obstacle, plan)
                if obstacle == "prefix":  # it chose to wait: whoever goes on takes nothing from it
                    continue
                passed_over.append(group)
                if group.num_bypasses >= limit or len(passed_over) > limit:
                    closed = obstacle
                continue
            entered.append(group)
            num_partial += self._giving.stays_partial(group, plan)
            for other in passed_over:
                other.be_bypassed()
                if other.num_bypasses >= limit:
                    closed = other.wait_reason
        return entered

    def seat(self, elder: Group, plan: StepPlan, now: float) -> None:
        """Bring the elder in, at the cost of as many others as it takes."""
        self._room.make_seat(elder, plan)
        match = self._match(elder)
        self._room.make_seat_blocks(elder, match, plan)
        if match.restored:  # whoever was swapped out for it may have taken their place on the host
            match = self._match(elder)
        self._enter(elder, match, plan, now)

    def num_cached_tokens(self, group: Group) -> int:
        """Tokens of a waiting group's prompt that it would not have to compute if it entered now."""
        return self._match(group).num_tokens

    @property
    def kv_waiting_since(self) -> float | None:
        """When the group at the queue's head began to wait for blocks; None: no group does."""
        blocked = self._kv_blocked
        is_over = blocked is None or blocked.state in ("finished", "held")
        return None if is_over else self._kv_blocked_since

    def note_kv_wait(self, now: float) -> None:
        """Account the time that a group spends at the queue's head for want of blocks."""
        waiting = self._roster.waiting
        blocked = waiting[0] if waiting and waiting[0].wait_reason == "kv" else None
        if self.kv_waiting_since is not None:
            self.total_kv_wait_seconds += now - self._kv_noted_at
        self._kv_noted_at = now
        if blocked is self._kv_blocked:
            return
        if self._kv_blocked is not None:
            self._kv_blocked.note_kv_wait(now - self._kv_blocked_since)
        self._kv_blocked, self._kv_blocked_since = blocked, now

    def _by_class(self) -> Iterator[Group]:
        """All who wait, each class in the queue policy's order."""
        for part in self._classes.parts(self._roster.waiting):
            yield from self._queue.arrange(part, self.num_cached_tokens)

    def _may_begin(self, group: Group, plan: StepPlan) -> bool:
        """Whether only others' prompts are in the way: each class, and each tenant that is counted, has its own."""
        own = [each for each in self._roster.running if each.side == group.side and each is not plan.elder]
        return sum(self._giving.stays_partial(each, plan) for each in own) < self._limits.max_num_partial_prefills

    def _make_class_room(self, group: Group, plan: StepPlan) -> bool:
        """Preempt a batch group for an interactive one; False if it must wait all the same."""
        victims = self._classes.victims(group, self._roster.running, plan.elder)
        if not victims:
            return False
        seats = self._limits.max_num_seqs - self._roster.num_running + sum(len(each.sequences) for each in victims)
        blocks = self._kv.num_available + sum(len(s.table) for each in victims for s in each.sequences)
        need = self._kv.seat_cost(group.leader, self._match(group)) + group.blocks_beside_leader()
        if seats < len(group.sequences) or not self._capacity.fits(group, need=need, available=blocks):
            return False  # nobody is preempted in vain
        self._room.make_for_class(victims[0], plan)
        return True

    def _let_wait(self, group: Group, reason: WaitReason, plan: StepPlan) -> None:
        if group.wait_reason != reason:
            plan.note("waits", group, reason=reason)
        group.wait_for(reason)

    def _try_to_enter(self, group: Group, plan: StepPlan, num_partial: int, now: float) -> WaitReason | None:
        """Run the group and give it its first tokens, or say why not."""
        limits = self._limits
        if self._roster.num_running + len(group.sequences) > limits.max_num_seqs:
            return "slots"
        if group.awaited is not None and self._kv.is_promised(group.awaited):
            return "prefix"
        match = self._match(group)
        leader = group.leader
        if self._joins(group, match):
            return "prefix"
        pending = group.pending(leader) - match.num_tokens
        first = self._giving.first_chunk(pending, plan)
        goes_on = first < pending or any(follower.num_output_tokens > 0 for follower in group.followers())
        goes_on = goes_on or group.returns_behind
        is_one_more = goes_on and num_partial >= limits.max_num_partial_prefills and not self._may_begin(group, plan)
        if is_one_more or plan.budget < min(pending, limits.min_chunk):
            return "budget"
        if not self._fits(group, match):
            return "kv"
        self._enter(group, match, plan, now)
        self._giving.give_chunks(group, plan)
        return None

    def _joins(self, group: Group, match: PrefixMatch) -> bool:
        """Whether the group should wait for what others compute of its prompt, and then enter with that."""
        awaited = None
        if group.reads_cache and not group.is_swapped:  # who comes back has its own
            awaited = self._kv.awaited(group.leader, match, group.pending(group.leader) - 1)
        group.wait_for_promise(awaited)
        return awaited is not None

    def _match(self, group: Group) -> PrefixMatch:
        """The cached prefix that the group would enter with; at least one token is left to compute."""
        if not (group.reads_cache or group.is_swapped):
            return NO_MATCH
        match = self._kv.match(group.leader, group.pending(group.leader) - 1)
        if match.tail is None or self._fits(group, match):
            return match
        return match.without_tail(self._kv.block_size)  # while a tail is copied it takes a block more

    def _fits(self, group: Group, match: PrefixMatch) -> bool:
        need = self._kv.seat_cost(group.leader, match) + group.blocks_beside_leader()
        return self._capacity.fits(group, need=need, available=self._kv.num_available)

    def _enter(self, group: Group, match: PrefixMatch, plan: StepPlan, now: float) -> None:
        if group.first_scheduled is None and group.reads_cache and self._limits.enable_prefix_caching:
            self.total_query_tokens += len(group.leader.token_ids)
            self.total_hit_tokens += match.num_tokens
        self._accounts.enter(group, match.num_tokens)
        self.total_saved_tokens += match.num_tokens
        plan.note("enters", group, num_tokens=match.num_tokens)
        self._roster.enter(group, match, now)
