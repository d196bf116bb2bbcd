"""Gives a step's tokens to sequences that run, and takes the blocks to write them.

Promises: blocks are reserved before tokens are given; where they are short, room is made first. Must not know: the
queue policy, in which order groups are asked.
"""

from __future__ import annotations

from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.policies.chunk import FixedChunk
from quire_engine.scheduling.room import Room
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_plan import StepPlan


class Giving:
    """Slices for running groups."""

    def __init__(self, chunk: FixedChunk, kv: KVAllocator, room: Room) -> None:
        self._chunk = chunk
        self._kv = kv
        self._room = room

    def give(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Plan tokens of a sequence and take the blocks to write them; False if its group was preempted instead."""
        end = sequence.num_computed + plan.slices.get(sequence, 0) + num_tokens
        cost = self._kv.reserve_cost(sequence, end)
        if cost > self._kv.num_available and not self._room.make_blocks(sequence.group, cost, plan):
            return False
        plan.give(sequence, num_tokens, self._kv.reserve(sequence, end))
        return True

    def give_decodes(self, group: Group, plan: StepPlan) -> bool:
        """One token for each sequence that has just one left; True if any has more."""
        has_more = False
        for sequence in group.computing:
            pending = group.pending(sequence)
            if pending > 1:
                has_more = True
            elif sequence not in plan.slices and not self.give(sequence, 1, plan):
                return False
        # The last token of a prompt, with outputs behind it that are known: those come next.
        return has_more or (not group.prompt_shared and self.stays_partial(group, plan))

    def give_chunks(self, group: Group, plan: StepPlan, *, others: bool = True) -> None:
        """A chunk of each unfinished prompt; `others`: more may want a part of the step."""
        for sequence in group.computing:
            planned = plan.slices.get(sequence, 0)
            pending = group.pending(sequence) - planned
            if pending == 0:
                continue
            size = self._chunk.size(pending=pending, planned=planned, budget=plan.budget, others=others)
            if size > 0 and not self.give(sequence, size, plan):
                return

    def first_chunk(self, pending: int, plan: StepPlan) -> int:
        """The size of the first slice of a group that enters with so many tokens to compute."""
        return self._chunk.size(pending=pending, planned=0, budget=plan.budget, others=True)

    def stays_partial(self, group: Group, plan: StepPlan) -> bool:
        """Whether the group will be in the middle of its known tokens after this step."""
        if any(group.pending(sequence) > plan.slices.get(sequence, 0) for sequence in group.computing):
            return True
        return any(follower.num_output_tokens > 0 for follower in group.followers())
