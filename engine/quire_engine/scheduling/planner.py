"""Plans one step: the tokens of each running sequence, the requests that enter, those that are preempted.

A step never exceeds its token budget, its slots or the free blocks. Every running decode advances or is preempted.

One step, `Planner.plan`, assigns `max_num_batched_tokens` tokens:
 1. the elder stays the elder until it ends; then `ElderRule.choose` picks the overdue group that arrived first;
 2. `Admission.seat`: a waiting elder enters, and other groups are preempted as needed;
 3. `_serve_elder`: the elder gets its decodes, and tokens of its prompt up to `min_chunk` in all;
 4. `_serve_decodes`: every other running sequence with one token to compute gets it, those with rows all at once;
 5. if sequences decode, `ItlTarget.prompt_tokens` limits the tokens left for prompts;
 6. `_serve_prefills`: the running groups' unfinished prompts get chunks of the size of `FixedChunk`, except those that
    `PromptTurns` defers;
 7. `Admission.admit`: waiting groups enter, resumed ones first, then in the queue policy's order, with their first
    chunk, while slots, budget and blocks last; a blocked group is overtaken at most `max_bypasses` times; after a
    preemption no group enters; a class that is due has all it can use before a group of the other one enters;
 8. `_assign_rest`: tokens that are still unassigned go to the prompts, first to those of the class that goes first;
 9. `Assigner.assign`, in all of these: blocks are reserved before tokens are assigned; if blocks are short,
    `Preemptor` preempts the victim policy's choice, never the elder, or the group itself;
10. `Admission.note_kv_wait`: counts the time that the group at the queue's head waits for blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Values
from itertools import chain, takewhile

from quire_engine.contract.invariants import InvariantViolation, require
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import PreemptionCause, WaitReason
from quire_engine.scheduling.blocks import NO_MATCH, PrefixMatch
from quire_engine.scheduling.fairness import Accounts
from quire_engine.scheduling.forecast import CapacityPolicy, has_room
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.policies import FixedChunk, Policies, QueuePolicy, has_adapter_room
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.running_decodes import RunningDecodes
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.shares import ClassShares, TenantShares
from quire_engine.scheduling.step_plan import StepPlan
from quire_engine.scheduling.swapping import Swapping


class Planner:
    """Plans every step over one roster and one allocator, and keeps the elder between steps."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policies: Policies,
        kv: KVAllocator,
        roster: Roster,
        *,
        decodes: RunningDecodes,
        swapping: Swapping | None = None,
    ) -> None:
        self.elder: Group | None = None
        self.step = 0  # number of the last planned step
        self._limits = limits
        self._policies = policies
        self._kv = kv
        self._roster = roster
        self._decodes = decodes
        is_fair = limits.scheduling_policy == "wfq"
        self.accounts = Accounts(of_everyone=is_fair)
        self._classes = ClassShares(limits.class_share)
        self._turns = PromptTurns(limits.max_consecutive_chunks, self._classes, by_account=is_fair)
        shares = (
            TenantShares(roster, self.accounts, max_num_seqs=limits.max_num_seqs, num_blocks=kv.num_blocks)
            if is_fair
            else None
        )
        preemptor = Preemptor(limits, policies, kv, roster, decodes=decodes, shares=shares, swapping=swapping)
        self._preemptor = preemptor
        self._assigner = Assigner(policies.chunk, kv, preemptor, decodes)
        self.admission = Admission(
            limits,
            queue=policies.queue,
            capacity=policies.capacity,
            assigner=self._assigner,
            preemptor=preemptor,
            kv=kv,
            roster=roster,
            classes=self._classes,
            accounts=self.accounts,
            shares=shares,
        )

    def plan(self, step: int, now: float) -> StepPlan:
        """The plan of step number `step`. It takes blocks and moves groups between the queues."""
        self.step = step
        last, self.elder = self.elder, self._elder(step)
        plan = StepPlan(step, self._limits.max_num_batched_tokens, self.elder)
        if self.elder is not last:
            self._decodes.except_for(self.elder)
        if self.elder is not None:
            if self.elder is not last:
                plan.note("elder", self.elder)
            self._serve_elder(self.elder, plan, now)
        prefilling = self._serve_decodes(plan)
        if prefilling or self._roster.waiting:
            plan.limit(self._policies.itl.prompt_tokens(self._num_streams(plan, prefilling)))
        num_partial = self._serve_prefills(prefilling, plan)
        if self._roster.waiting:
            prefilling += self.admission.admit(plan, num_partial, now)
        self._assign_rest(prefilling, plan)
        self.admission.note_kv_wait(now)
        self.accounts.charge(plan)
        num_batch = self._decodes.num_batch
        self._classes.note(plan, self._roster.running, self._roster.waiting, batch_rows=num_batch)
        if self._policies.charge is not None and self._roster.waiting:
            self._policies.charge(self._decodes.every_slice(plan))
        self._kv.unpin()
        return plan

    def accept(self, group: Group) -> None:
        """Open the account of a group that has just joined the queue."""
        is_fair = self._limits.scheduling_policy == "wfq"  # the other policies do not read the size
        num_tokens = group.num_prompt_tokens - (self.admission.num_cached_tokens(group) if is_fair else 0)
        group.charge_to(self.accounts.open(group.request, num_tokens))
        self.accounts.begin_to_wait(group, self._roster.waiting)

    def drop_elder(self, group: Group) -> None:
        """The group is about to be held: if it is the elder, the next step chooses another one."""
        if self.elder is group:
            self.elder = None
            self._decodes.except_for(None)

    def lone_chunk(self, group: Group, num_decodes: int) -> int:
        """Return the tokens that a step assigns to the only running prompt, beside decodes and while no group waits.

        Claim, chunk and rest, as `plan` assigns them.
        """
        pending, budget, planned = group.pending(group.leader), self._limits.max_num_batched_tokens - num_decodes, 0
        if group is self.elder:
            planned = min(pending, self._limits.min_chunk)
            budget -= planned
        budget = min(budget, self._policies.itl.prompt_tokens(num_decodes))
        for others in (True, False):
            left, chunk = pending - planned, self._policies.chunk
            size = chunk.size(pending=left, planned=planned, budget=budget, others=others) if left else 0
            if size > 0:
                planned, budget = planned + size, budget - size
        return planned

    def note_skipped(self, count: int, *, prompt: Group | None = None) -> None:
        """Count steps that were taken without a plan; `prompt`: the group that had a chunk in each, if one had."""
        self.step += count
        if prompt is not None:
            self._turns.first([prompt], [])

    def check(self) -> None:
        """Raise InvariantViolation where the roster disagrees with itself or the limits, or the elder is held."""
        limits, roster = self._limits, self._roster
        roster.check()
        require(roster.num_running <= limits.max_num_seqs, f"{roster.num_running} sequences run")
        adapters = {group.adapter for group in roster.running if group.adapter}
        require(len(adapters) <= limits.max_loras, f"{len(adapters)} adapters run")
        others = [group for group in roster.running if group is not self.elder]
        for side, partial in Counter(group.side for group in others if group.is_prefilling).items():
            require(partial <= limits.max_num_partial_prefills, f"{partial} requests of {side} compute their prompts")
        require(self.elder not in roster.held.values(), "the elder is held")
        self._decodes.check(self.elder)

    def _elder(self, step: int) -> Group | None:
        if self.elder is None or self.elder.state == "finished":
            return self._policies.elder.choose(self._roster.contenders(), step)
        return self.elder

    def _serve_elder(self, elder: Group, plan: StepPlan, now: float) -> None:
        """Assign the elder's decodes, then its first claim: up to `min_chunk` tokens in all."""
        if elder.state != "running":
            self.admission.seat(elder, plan, now)
        self._assigner.assign_decodes(elder, plan)
        claim = self._limits.min_chunk - plan.planned(elder)
        for sequence in elder.computing:
            num_tokens = min(elder.pending(sequence), claim)
            if num_tokens > 0 and sequence not in plan.slices:
                claim -= num_tokens
                self._assigner.assign(sequence, num_tokens, plan)

    def _serve_decodes(self, plan: StepPlan) -> list[Group]:
        """Assign one token to every running decode; returns the groups that have more than one token to compute."""
        others = [
            group
            for group in self._decodes.serve(plan, self._preemptor.free_blocks)
            if group.state == "running" and self._assigner.assign_decodes(group, plan)
        ]
        plan.end_decodes()
        return others

    def _num_streams(self, plan: StepPlan, prefilling: list[Group]) -> int:
        """Streams that the step's prompts may not delay: none if all are batch's, and interactive prompts are due."""
        if self._classes.due != "interactive":
            return plan.num_streams
        interactive = (group for group in self._roster.running if not group.is_batch)
        if any(s.num_output_tokens for group in interactive for s in group.sequences):
            return plan.num_streams
        queues = [queue for queue in (prefilling, self._roster.waiting) if queue]
        return 0 if any(not queue[0].is_batch for queue in queues) else plan.num_streams

    def _serve_prefills(self, groups: list[Group], plan: StepPlan) -> int:
        """Assign chunks of unfinished prompts; returns how many groups besides the elder stay unfinished."""
        for group in self._turns.first(groups, self._roster.waiting):
            if group.state == "running":
                self._assigner.assign_chunks(group, plan)
        others = [group for group in groups if group.state == "running" and group is not plan.elder]
        return sum(1 for group in others if self._assigner.stays_partial(group, plan))

    def _assign_rest(self, groups: list[Group], plan: StepPlan) -> None:
        """Assign the rest of the budget to prompts. Blocks were taken when they entered, except those of windows."""
        for group in sorted(groups, key=self._classes.goes_first, reverse=True):
            if group.state == "running":
                self._assigner.assign_chunks(group, plan, others=False)


class Admission:
    """Admission control: lets waiting groups enter in order, and records why the others wait.

    Slots, budget and blocks are never exceeded; no group is overtaken more than `max_bypasses` times.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        queue: QueuePolicy,
        capacity: CapacityPolicy,
        assigner: Assigner,
        preemptor: Preemptor,
        kv: KVAllocator,
        roster: Roster,
        classes: ClassShares,
        accounts: Accounts,
        shares: TenantShares | None,
    ) -> None:
        self.total_prefix_query_tokens = 0
        self.total_prefix_hit_tokens = 0
        self.total_prefill_tokens_saved = 0  # hits, and cached tokens that preempted groups entered with
        self._limits = limits
        self._queue = queue
        self._capacity = capacity
        self._assigner = assigner
        self._preemptor = preemptor
        self._kv = kv
        self._roster = roster
        self._classes = classes
        self._accounts = accounts
        self._shares = shares  # None: tenants have none
        self._kv_blocked: Group | None = None  # the queue's head, while it waits for blocks
        self._kv_blocked_since = 0.0
        self._kv_noted_at = 0.0
        self.total_kv_wait_seconds = 0.0

    def admit(self, plan: StepPlan, num_partial: int, now: float) -> list[Group]:
        """Let waiting groups enter in order; returns the groups that entered.

        A group that cannot enter may be overtaken at most `max_bypasses` times in its life, and at most that many
        groups are skipped in one step; one that waits for room for its adapter is overtaken by groups with adapters
        alone. After a preemption no group enters: the freed blocks belong to the group that needed them.
        """
        closed: WaitReason | None = "kv" if plan.num_preempted else None
        limit = self._limits.max_bypasses
        entered: list[Group] = []
        passed_over: list[Group] = []
        without_room: list[Group] = []  # groups whose adapter waits for the end of another's use
        visited: list[Group] = []  # groups that might have entered
        is_turn_over = False  # one of those has been overtaken often enough: no group with an adapter enters
        queue = self._by_class(plan)
        if closed is not None or plan.budget == 0:
            self._let_all_wait(queue, closed or "budget", visited, plan)
            return entered
        for group in queue:
            if closed is not None or plan.budget == 0:
                self._let_all_wait(chain([group], queue), closed or "budget", visited, plan)
                break
            visited.append(group)
            if not self._accounts.has_seats(group, self._roster.running):
                # Its tenant's quota is used up: others that enter do not bypass it.
                self._let_wait(group, "slots", plan)
                continue
            # What others hold beside their adapters is of no use to a group that waits for the end of an adapter's use,
            # and groups without an adapter do not put that end off.
            if group.adapter and (
                is_turn_over or not has_adapter_room(group, self._roster.adapters.running, self._limits.max_loras)
            ):
                self._let_wait(group, "slots", plan)
                without_room.append(group)
                is_turn_over = is_turn_over or group.num_bypasses >= limit
                continue
            obstacle = self._try_to_enter(group, plan, num_partial, now)
            while obstacle in ("slots", "kv") and self._preempt_for(group, entered, plan):
                obstacle = self._try_to_enter(group, plan, num_partial, now)
            if obstacle is not None:
                self._let_wait(group, obstacle, plan)
                if obstacle == "prefix":  # it waits by choice, so others do not bypass it
                    continue
                passed_over.append(group)
                if group.num_bypasses >= limit or len(passed_over) > limit:
                    closed = obstacle
                continue
            entered.append(group)
            num_partial += self._assigner.stays_partial(group, plan)
            for other in without_room if group.adapter else ():
                other.note_bypass()
                is_turn_over = is_turn_over or other.num_bypasses >= limit
            for other in passed_over:
                other.note_bypass()
                if other.num_bypasses >= limit:
                    closed = other.wait_reason
        return entered

    def seat(self, elder: Group, plan: StepPlan, now: float) -> None:
        """Let the waiting elder enter, and preempt as many other groups as that needs."""
        self._preemptor.free_adapters_for(elder, plan)
        self._preemptor.free_slots_for(elder, plan)
        match = self._match(elder)
        self._preemptor.free_blocks_for(elder, match, plan)
        if match.restored:  # groups swapped out for it may have displaced these host blocks
            match = self._match(elder)
        self._enter(elder, match, plan, now)

    def num_cached_tokens(self, group: Group) -> int:
        """The cached part of a waiting group's prompt, in tokens, if it entered now."""
        return self._match(group).num_tokens

    def note_end(self, sequence: Sequence) -> None:
        """A choice has all its tokens: later expectations are learned from it."""
        self._capacity.note_end(sequence)

    @property
    def kv_waiting_since(self) -> float | None:
        """The time when the group at the queue's head began to wait for blocks; None where it does not."""
        blocked = self._kv_blocked
        is_over = blocked is None or blocked.state in ("finished", "held")
        return None if is_over else self._kv_blocked_since

    def note_kv_wait(self, now: float) -> None:
        """Add up the time during which the group at the queue's head waits for blocks."""
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

    def _by_class(self, plan: StepPlan) -> Iterator[Group]:
        """All waiting groups, class by class: resumed ones at the head, then the others in the queue policy's order.

        A resumed group has entered before, in an engine that is gone; no policy of entering holds it up again. Before
        the other class comes, the running prompts of a class that is due get all the tokens that they can take.
        """
        first, other = self._classes.parts(self._roster.waiting)
        yield from self._arranged(first)
        if other and self._classes.due is not None:
            for group in [group for group in self._roster.running if self._classes.goes_first(group)]:
                self._assigner.fill(group, plan)
        yield from self._arranged(other)

    def _arranged(self, part: list[Group]) -> Iterator[Group]:
        """The waiting groups of one class in the order in which they may enter."""
        resumed = list(takewhile(lambda group: group.is_resumed, part))
        others = part[len(resumed) :] if resumed else part
        yield from resumed
        yield from self._queue.arrange(others, self.num_cached_tokens)

    def _may_begin(self, group: Group, plan: StepPlan) -> bool:
        """Whether the group's own side (class and account) has begun fewer prompts than it may."""
        own = [each for each in self._roster.running if each.side == group.side and each is not plan.elder]
        return sum(self._assigner.stays_partial(each, plan) for each in own) < self._limits.max_num_partial_prefills

    def _preempt_for(self, group: Group, entered: list[Group], plan: StepPlan) -> bool:
        """Preempt a batch group for an interactive one, or one of a tenant above its share for one within it.

        False if that would not let the group enter. Those that have `entered` in this step stay: a group that enters
        and is preempted in one step would have entered for nothing.
        """
        cause: PreemptionCause = "class"
        victims = self._classes.victims(group, self._roster.running, plan.elder)
        if not victims and (self._shares is None or not self._shares.are_kept):
            return False
        need = self._need(group, self._match(group))
        if not victims and self._shares is not None and self._shares.is_owed(group, need):
            above = self._shares.most_above(plan.elder)
            cause, victims = "share", [each for each in above if each not in entered]
        if not victims:
            return False
        seats = self._limits.max_num_seqs - self._roster.num_running + sum(len(each.sequences) for each in victims)
        blocks = self._kv.num_available + sum(s.kv.num_held for each in victims for s in each.sequences)
        if seats < len(group.sequences) or not has_room(group, need=need, available=blocks):
            return False  # a preemption would not help
        self._preemptor.preempt_for_waiting(victims, cause, plan, by=group)
        return True

    def _let_all_wait(self, queue: Iterable[Group], reason: WaitReason, visited: list[Group], plan: StepPlan) -> None:
        """Let the rest of the queue wait; `visited`: the groups before it. Of a long one most have that reason yet."""
        others = [group for group in self._roster.waiting if group.wait_reason != reason]
        num_changed = len(set(others).difference(visited)) if others else 0
        for group in queue:
            if not num_changed:
                return
            num_changed -= group.wait_reason != reason
            self._let_wait(group, reason, plan)

    def _let_wait(self, group: Group, reason: WaitReason, plan: StepPlan) -> None:
        if group.wait_reason != reason:
            plan.note("waits", group, reason=reason)
        group.wait_for(reason)

    def _try_to_enter(self, group: Group, plan: StepPlan, num_partial: int, now: float) -> WaitReason | None:
        """Let the group enter and assign its first tokens; returns the obstacle if it cannot enter."""
        limits = self._limits
        if self._roster.num_running + len(group.sequences) > limits.max_num_seqs:
            return "slots"
        if group.awaited is not None and self._kv.is_promised(group.awaited):
            return "prefix"
        match = self._match(group)
        leader = group.leader
        if self._awaits_prefix(group, match):
            return "prefix"
        pending = group.pending(leader) - match.num_tokens
        first = self._assigner.first_chunk(pending, plan)
        goes_on = first < pending or any(follower.num_output_tokens > 0 for follower in group.followers())
        goes_on = goes_on or group.returns_behind
        is_one_more = goes_on and num_partial >= limits.max_num_partial_prefills and not self._may_begin(group, plan)
        if is_one_more or plan.budget < min(pending, limits.min_chunk):
            return "budget"
        if not self._fits(group, match, plan):
            return "kv"
        self._enter(group, match, plan, now)
        self._assigner.assign_chunks(group, plan)
        return None

    def _awaits_prefix(self, group: Group, match: PrefixMatch) -> bool:
        """Whether the group should wait for a prefix that a running sequence is computing."""
        awaited = None
        if group.reads_cache and not group.is_swapped:  # a swapped group has its own blocks
            awaited = self._kv.awaited(group.leader, match, group.pending(group.leader) - 1)
        group.wait_for_promise(awaited)
        return awaited is not None

    def _match(self, group: Group) -> PrefixMatch:
        """The cached prefix that the group would enter with; at least one token is left to compute."""
        if not (group.reads_cache or group.is_swapped):
            return NO_MATCH
        match = self._kv.match(group.leader, group.pending(group.leader) - 1)
        if match.tail is None or has_room(group, need=self._need(group, match), available=self._kv.num_available):
            return match
        return match.without_tail(self._kv.block_size)  # copying a tail needs one more block

    def _need(self, group: Group, match: PrefixMatch) -> int:
        """The blocks that the group takes when it enters."""
        return self._kv.seat_cost(group.leader, match) + group.blocks_beside_leader()

    def _fits(self, group: Group, match: PrefixMatch, plan: StepPlan) -> bool:
        """Whether the known tokens have room now, and what is to come has, or is owed to the group's tenant."""
        need, kv, running = self._need(group, match), self._kv, self._roster.running
        if not has_room(group, need=need, available=kv.num_available):
            return False
        is_shared = self._shares is not None and self._shares.are_divided
        if self._capacity.will_fit(group, need=need, kv=kv, running=running, step=plan.step, is_shared=is_shared):
            return True
        return self._shares is not None and self._shares.is_owed(group, need)

    def _enter(self, group: Group, match: PrefixMatch, plan: StepPlan, now: float) -> None:
        if group.first_scheduled is None and group.reads_cache and self._limits.enable_prefix_caching:
            self.total_prefix_query_tokens += len(group.leader.token_ids)
            self.total_prefix_hit_tokens += match.num_tokens
        self._accounts.enter(group, match.num_tokens)
        self.total_prefill_tokens_saved += match.num_tokens
        plan.note("enters", group, num_tokens=match.num_tokens)
        self._roster.enter(group, match, now)


class PromptTurns:
    """Defers some of the running prompts, so that others get the step's prompt tokens first.

    A prompt is deferred for one step after `max_consecutive_chunks` chunks in a row, if another prompt of its class and
    account is running or waiting. A prompt is deferred for those of the class that goes first: interactive, unless
    batch work is below its share. Under fair queueing a prompt is deferred for waiting groups of other accounts that
    have been charged no more, and for running prompts of other accounts that have fewer tokens left, all of its class.
    Tokens that remain in the step go to the deferred prompts. The elder's claim is not affected.
    """

    def __init__(self, max_consecutive_chunks: int, classes: ClassShares, *, by_account: bool) -> None:
        self._limit = max_consecutive_chunks
        self._classes = classes
        self._by_account = by_account
        self._in_a_row: dict[Group, int] = {}  # chunks; a group enters with its first one

    def first(self, prefilling: list[Group], waiting: list[Group]) -> list[Group]:
        """The running prompts that are not deferred, in their order."""
        if not prefilling or (len(prefilling) == 1 and not waiting):
            self._in_a_row.clear()
            return prefilling
        first = [group for group in prefilling if not self._gives_way(group, prefilling, waiting)]
        if self._limit:
            row = self._in_a_row
            self._in_a_row = dict.fromkeys(prefilling, 0) | {group: row.get(group, 1) + 1 for group in first}
        return first

    def _gives_way(self, group: Group, prefilling: list[Group], waiting: list[Group]) -> bool:
        is_over = self._limit and self._in_a_row.get(group, 1) >= self._limit
        if is_over and any(self._is_like(other, group) for other in chain(prefilling, waiting)):
            return True
        queues = [queue for queue in (prefilling, waiting) if queue]  # batch last in each
        if not self._classes.goes_first(group):
            goes_before = any(self._classes.goes_first(queue[end]) for queue in queues for end in (0, -1))
            if goes_before:
                return True
        own = group.account
        if not self._by_account or own is None:
            return False
        if any(
            other.account is not own and other.is_batch == group.is_batch and _tokens_left(other) < _tokens_left(group)
            for other in prefilling
        ):
            return True
        return any(
            other.account is not None and other.account is not own and other.account.goes_before(own)
            for other in waiting
            if other.is_batch == group.is_batch
        )

    def _is_like(self, other: Group, group: Group) -> bool:
        """Whether both groups have the same class and, under fair queueing, the same account."""
        is_same = other.account is group.account or not self._by_account
        return other is not group and other.is_batch == group.is_batch and is_same


def _tokens_left(group: Group) -> int:
    return sum(group.pending(sequence) for sequence in group.computing)


class Assigner:
    """Assigns a step's token budget to running sequences and reserves their KV blocks."""

    def __init__(self, chunk: FixedChunk, kv: KVAllocator, preemptor: Preemptor, decodes: RunningDecodes) -> None:
        self._chunk = chunk
        self._kv = kv
        self._decodes = decodes
        self._preemptor = preemptor

    def assign(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Assign tokens to a sequence and reserve their blocks; False if its group was preempted instead."""
        end = sequence.kv.num_computed + plan.slices.get(sequence, 0) + num_tokens
        cost = self._kv.reserve_cost(sequence, end)
        if cost > self._kv.num_available and not self._preemptor.free_blocks(sequence.group, cost, plan):
            return False
        plan.assign(sequence, num_tokens, self._kv.reserve(sequence, end))
        return True

    def assign_decodes(self, group: Group, plan: StepPlan) -> bool:
        """One token for each sequence that has one token left; True if any sequence has more."""
        has_more = False
        for sequence in group.computing:
            pending = group.pending(sequence)
            if pending > 1:
                has_more = True
            elif sequence not in plan.slices and not self.assign(sequence, 1, plan):
                return False
        # The last token of a prompt; other choices of the group have known outputs to compute after it.
        return has_more or (not group.prompt_shared and self.stays_partial(group, plan))

    def assign_chunks(self, group: Group, plan: StepPlan, *, others: bool = True) -> None:
        """A chunk of each unfinished prompt; `others`: other groups may want a part of the step."""
        for sequence in group.computing:
            planned = plan.slices.get(sequence, 0)
            pending = group.pending(sequence) - planned
            if pending == 0:
                continue
            size = self._chunk.size(pending=pending, planned=planned, budget=plan.budget, others=others)
            if size > 0 and not self.assign(sequence, size, plan):
                return

    def fill(self, group: Group, plan: StepPlan) -> None:
        """Assign all that is left of the budget to a group's unfinished prompt, as far as blocks are free for it."""
        if not self.stays_partial(group, plan):
            return
        for sequence in group.computing:
            planned = plan.slices.get(sequence, 0)
            pending = group.pending(sequence) - planned
            size = self._chunk.size(pending=pending, planned=planned, budget=plan.budget, others=False)
            end = sequence.kv.num_computed + planned + size
            if size > 0 and self._kv.reserve_cost(sequence, end) <= self._kv.num_available:
                self.assign(sequence, size, plan)

    def first_chunk(self, pending: int, plan: StepPlan) -> int:
        """The size of the first chunk of a group that enters with `pending` tokens to compute."""
        return self._chunk.size(pending=pending, planned=0, budget=plan.budget, others=True)

    def stays_partial(self, group: Group, plan: StepPlan) -> bool:
        """Whether the group will be in the middle of its known tokens after this step."""
        if group in self._decodes:
            return False
        if any(group.pending(sequence) > plan.slices.get(sequence, 0) for sequence in group.computing):
            return True
        return any(follower.num_output_tokens > 0 for follower in group.followers())


class Preemptor:
    """Preemption: frees blocks and slots, one victim of the victim policy after the other.

    The elder is never preempted. While a tenant holds more than its share, victims are its groups. A victim loses all
    tokens that this step had assigned to it.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policies: Policies,
        kv: KVAllocator,
        roster: Roster,
        *,
        decodes: RunningDecodes,
        shares: TenantShares | None = None,
        swapping: Swapping | None = None,
    ) -> None:
        self._limits = limits
        self._victim = policies.victim
        self._capacity = policies.capacity
        self._kv = kv
        self._roster = roster
        self._decodes = decodes
        self._shares = shares
        self._swapping = swapping  # None: every preempted group is recomputed

    def free_blocks(self, group: Group, cost: int, plan: StepPlan) -> bool:
        """Preempt until `cost` blocks are available; False if the running group itself was preempted."""
        while cost > self._kv.num_available:
            if group is plan.elder:
                self._preempt_for_elder(plan)
                continue
            victim = self._choose(plan) or group
            self._preempt(victim, "blocks", plan, by=group)
            if victim is group:
                return False
        return True

    def free_slots_for(self, elder: Group, plan: StepPlan) -> None:
        """Preempt until the waiting elder has slots for all its sequences."""
        while self._roster.num_running + len(elder.sequences) > self._limits.max_num_seqs:
            self._preempt_for_elder(plan)

    def free_adapters_for(self, elder: Group, plan: StepPlan) -> None:
        """Preempt until the waiting elder's adapter may run: all groups of those that the fewest groups have."""
        while not has_adapter_room(elder, self._roster.adapters.running, self._limits.max_loras):
            used = Counter(group.adapter for group in self._roster.running if group.adapter)
            least = min(used, key=lambda adapter: (used[adapter], adapter))
            for group in [group for group in self._roster.running if group.adapter == least]:
                self._preempt(group, "elder", plan, by=elder)

    def free_blocks_for(self, elder: Group, match: PrefixMatch, plan: StepPlan) -> None:
        """Preempt until the waiting elder has blocks for its known tokens, given its cached prefix."""
        while self._kv.seat_cost(elder.leader, match) > self._kv.num_available:
            self._preempt_for_elder(plan)

    def preempt_for_waiting(self, victims: Values[Group], cause: PreemptionCause, plan: StepPlan, *, by: Group) -> None:
        """Preempt one of `victims` for the group `by`, which waits."""
        if cause == "class":
            victims[0].note_class_preemption()
            self._preempt(victims[0], cause, plan, by=by)
        else:
            self._preempt(self._victim.choose(victims, plan.elder) or victims[-1], cause, plan, by=by)

    def _preempt_for_elder(self, plan: StepPlan) -> None:
        victim = self._choose(plan)
        if victim is None or plan.elder is None:
            raise InvariantViolation("the elder is short of blocks or slots with nobody else running")
        self._preempt(victim, "elder", plan, by=plan.elder)

    def _choose(self, plan: StepPlan) -> Group | None:
        above = self._shares.most_above(plan.elder) if self._shares is not None else []
        return self._victim.choose(above or self._roster.running, plan.elder)

    def _preempt(self, group: Group, cause: PreemptionCause, plan: StepPlan, *, by: Group) -> None:
        """Preempt `group` for the group `by`, which may be the same one."""
        copied_from = plan.take_back(group, num_rows=self._decodes.leave(group))
        self._kv.cancel_copies(group.sequences, copied_from.keys())
        is_kept = self._swapping is not None and self._swapping.swap_out(group, copied_from)
        num_kept = (
            sum(sequence.kv.swapped.num_tokens for sequence in group.sequences if sequence.kv.swapped) if is_kept else 0
        )
        taker = "" if by is group else by.request.request_id
        plan.note("preempted", group, reason=cause, num_tokens=num_kept, by=taker)
        if cause != "class":
            self._capacity.note_preemption(plan.step)
        self._roster.preempt(group, cause, is_kept=is_kept)
