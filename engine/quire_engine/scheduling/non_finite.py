"""What becomes of a request whose row held a value that is no number, and of the blocks that it read and wrote.

Promises: nobody is given what those blocks hold; a request that may have read what others computed is computed anew,
once, and ends if that brings the same. Must not know: why a value is no number, how steps are computed.
"""

from __future__ import annotations

from quire_engine.batch import Batch, StepResult
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.roster import Roster
from quire_engine.types import NON_FINITE


def part_with(batch: Batch, result: StepResult, roster: Roster, kv: KVAllocator) -> None:
    """Put those of `result.non_finite` among its starved ones, which are computed anew, or else among its errors.

    A prefix that another request left in the cache may be what is wrong: computed anew it is not found any more.
    Blocks need not be cleared: attention never has what lies behind a sequence's end for an operand, and what lies
    before it is written before it is read.
    """
    for item in batch.items:
        sequence = roster.sequences.get(item.sequence_id)
        if sequence is None or item.run != sequence.group.num_preemptions:
            continue
        concerned = [item.sequence_id, *(fork.sequence_id for fork in item.forks)]
        if result.non_finite.isdisjoint(concerned):
            continue
        group = sequence.group
        kv.disown(group.sequences)
        for sequence_id in concerned:  # neither token nor error: what is put down below is all that is said of them
            result.samples.pop(sequence_id, None)
            result.errors.pop(sequence_id, None)
        if group.num_starved:
            result.errors[item.sequence_id] = NON_FINITE
        else:
            result.starved.add(item.sequence_id)
