"""The live groups by state: running, waiting or held.

A live group is in exactly one queue, in the order policy's order, or held. Leaving the running queue frees its blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from itertools import count

from quire_engine.contract.invariants import require
from quire_engine.contract.types import PREEMPTION_CAUSES, GenerationRequest, HoldReason, PreemptionCause
from quire_engine.scheduling.adapter_use import AdapterUse
from quire_engine.scheduling.blocks import PageTable, PrefixMatch, SequenceKV
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.policies import OrderPolicy
from quire_engine.scheduling.running_decodes import RunningDecodes
from quire_engine.scheduling.sequence import Group, Sequence


class Roster:
    """The lives of the groups: join, then enter and be preempted in turns, then end."""

    def __init__(self, kv: KVAllocator, order: OrderPolicy, decodes: RunningDecodes) -> None:
        self.live: dict[str, Group] = {}  # in the order of arrival, or of the last release
        self.running = decodes.running
        self.waiting: list[Group] = []
        self.held: dict[str, Group] = {}  # live, and in neither queue
        self.sequences: dict[int, Sequence] = {}  # unfinished ones, by id
        self.num_running = 0  # sequences of running groups
        self.adapters = AdapterUse()
        self.total_preemptions = self.total_recomputed_tokens = 0
        self.total_preemptions_by_cause: dict[PreemptionCause, int] = dict.fromkeys(PREEMPTION_CAUSES, 0)
        self._kv = kv
        self._order = order
        self._decodes = decodes
        self._arrivals = count()
        self._sequence_ids = count()

    def join(self, request: GenerationRequest, *, step: int, work: int, wait_bound: int, footprint: int) -> Group:
        """Make a group for the request and put it into the waiting queue."""
        resumed = request.resumed_token_ids or ((),) * request.num_sequences
        scores_prompt = request.sampling.num_prompt_logprobs is not None
        group = Group(
            request=request,
            arrival=next(self._arrivals),
            added_step=step,
            work=work,
            wait_bound=wait_bound,
            footprint=footprint,
            # A resumed request has received them with the first output of choice 0, if that came.
            prompt_logprobs_due=scores_prompt and 0 not in request.finished_choices and not resumed[0],
        )
        for choice in range(request.num_sequences):
            if choice not in request.finished_choices:
                sequence = Sequence(
                    sequence_id=next(self._sequence_ids),
                    choice=choice,
                    group=group,
                    own_token_ids=[*request.prompt_token_ids, *resumed[choice]],
                    num_prompt_tokens=len(request.prompt_token_ids),
                    kv=SequenceKV(tables=tuple([PageTable(self._kv.block_size, each) for each in self._kv.groups])),
                )
                group.add_choice(sequence)
                self.sequences[sequence.sequence_id] = sequence
        self.live[request.request_id] = group
        self.adapters.join(group.adapter)
        insort(self.waiting, group, key=self._order.key)
        return group

    def enter(self, group: Group, match: PrefixMatch, now: float) -> None:
        """Run a waiting group: its leader gets the matched blocks, and new ones for the rest of its known tokens."""
        self._kv.seat(group.leader, match)
        group.enter(now)
        self.num_running += len(group.sequences)
        self.adapters.enter(group.adapter)
        self.waiting.remove(group)
        insort(self.running, group, key=self._order.key)

    def preempt(self, group: Group, cause: PreemptionCause, *, is_kept: bool = False) -> None:
        """Free a running group's blocks and put it back into its old place in the waiting queue.

        `is_kept`: its blocks are swapped out already.
        """
        if not is_kept:
            self._decodes.leave(group)
            group.preempt()
            for sequence in group.sequences:
                self._kv.release(sequence)
        self.total_preemptions += 1
        self.total_preemptions_by_cause[cause] += 1
        self.num_running -= len(group.sequences)
        self.adapters.stop(group.adapter)
        self.running.remove(group)
        insort(self.waiting, group, key=self._order.key)

    def hold(self, group: Group, reason: HoldReason) -> None:
        """Take a live group out of its queue and free its blocks."""
        if group.state == "running":
            self._decodes.leave(group)
            group.preempt()
            for sequence in group.sequences:
                self._kv.release(sequence)
            self.num_running -= len(group.sequences)
            self.adapters.stop(group.adapter)
            self.running.remove(group)
        else:
            self.waiting.remove(group)
        group.hold(reason)
        self.adapters.hold(group.adapter)
        self.held[group.request.request_id] = group

    def release(self, group: Group, *, step: int, wait_bound: int) -> None:
        """Put a held group back into its old place in the waiting queue, with a new wait bound."""
        request_id = group.request.request_id
        group.release(step, wait_bound)
        self.live[request_id] = self.live.pop(request_id)
        del self.held[request_id]
        self.adapters.release(group.adapter)
        self.adapters.join(group.adapter)
        insort(self.waiting, group, key=self._order.key)

    def contenders(self) -> Iterable[Group]:
        """The live groups that are not held, in the order of `live`."""
        if not self.held:
            return self.live.values()
        return [group for group in self.live.values() if group.state != "held"]

    def end(self, sequence: Sequence) -> None:
        """End a choice, and its group with the last one."""
        group = sequence.group
        self._decodes.leave(group)
        self._kv.release(sequence)
        del self.sequences[sequence.sequence_id]
        was = group.state
        if was == "running":
            self.num_running -= 1
        if group.end(sequence):
            if was == "held":
                del self.held[group.request.request_id]
                self.adapters.release(group.adapter)
            else:
                if was == "running":
                    self.adapters.stop(group.adapter)
                self.adapters.leave(group.adapter)
                (self.running if was == "running" else self.waiting).remove(group)
            del self.live[group.request.request_id]

    def end_all(self, group: Group) -> list[Sequence]:
        """End a group; returns the sequences that were unfinished."""
        ended = list(group.sequences)
        for sequence in ended:
            self.end(sequence)
        return ended

    def check(self) -> None:
        """Raise InvariantViolation if queues, counts, tables and blocks disagree."""
        self._kv.check(self.sequences.values())
        listed = sorted(group.arrival for group in [*self.running, *self.waiting, *self.held.values()])
        live = sorted(group.arrival for group in self.live.values())
        require(listed == live, "a live group is not in exactly one queue, nor held")
        require(all(group.state == "held" for group in self.held.values()), "a group is held that is not")
        for queue in (self.running, self.waiting):
            require(queue == sorted(queue, key=self._order.key), "a queue is out of order")
        counted = sum(len(group.sequences) for group in self.running)
        require(counted == self.num_running, f"{counted} sequences run, {self.num_running} are counted")
        known = sum(len(group.sequences) for group in self.live.values())
        require(known == len(self.sequences), f"{known} choices are unfinished, {len(self.sequences)} are listed")
        self.adapters.check(
            running=[group.adapter for group in self.running],
            waiting=[group.adapter for group in self.waiting],
            held=[group.adapter for group in self.held.values()],
        )
        for group in self.live.values():
            require((group in self.running) == (group.state == "running"), f"{_name(group)} is in the wrong queue")
            require(bool(group.sequences), f"{_name(group)} is live without a choice")
            for sequence in group.sequences:
                _check_sequence(sequence)


def _check_sequence(sequence: Sequence) -> None:
    group = sequence.group
    name = f"{_name(group)}, choice {sequence.choice}"
    known = sequence.num_known + sequence.kv.num_lent
    computed, reserved = sequence.kv.num_computed, sequence.kv.num_reserved
    blocks = sequence.kv.table.num_blocks_for(reserved)
    require(len(sequence.kv.table) == blocks, f"{name}: {len(sequence.kv.table)} blocks for {reserved} tokens")
    for table in sequence.kv.tables:
        first, needed = table.first_seen(computed), table.num_blocks_for(computed)
        require(table.num_passed <= first, f"{name}: position {first * table.block_size} has lost its block")
        require(needed <= len(table) <= blocks, f"{name}: {len(table)} blocks of one group, {blocks} of the first")
        most = table.group.most_blocks(known, table.block_size)
        require(table.num_held <= most, f"{name}: {table.num_held} blocks of one group, which needs {most}")
    require(computed <= reserved <= known, f"{name}: {computed} tokens computed, {reserved} reserved, {known} known")
    require(computed < sequence.num_known or sequence.is_launched, f"{name}: nothing left to compute")
    if group.state != "running" or (sequence not in group.computing and not sequence.is_launched):
        require(reserved == 0, f"{name}: holds blocks for {reserved} tokens without running")


def _name(group: Group) -> str:
    return f"request {group.request.request_id}"
