"""Takes many equal steps at once: every running sequence decodes, and no request can enter.

Promises: the scheduler is left as if each step had been scheduled and applied; a test compares both to the bit.

Without it a simulation would spend most of its time on steps without decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.cost_model import CostModel
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.sequence import Sequence

_SIMPLE = ("fcfs", "priority", "wfq")  # policies that count no tokens, or each by itself
_FEWEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Leap:
    """The steps taken, each with one token for each request."""

    request_ids: list[str]
    ends: list[float]
    blocks_used: list[int]  # in each step


def held_blocks(scheduler: Scheduler) -> int:
    """Blocks that sequences hold now; cheaper than `Scheduler.stats`."""
    return scheduler._kv.num_blocks - scheduler._kv.num_available


def leap(scheduler: Scheduler, cost: CostModel, now: float, due: float, num_left: Callable[[str], int]) -> Leap | None:
    """Take all equal steps from `now` on that begin before the next arrival, at `due`.

    `num_left`: the tokens that a request is to get yet, which the scheduler may not know. None if there are fewer than
    two: then the next step is to be planned.
    """
    sequences = _decoding(scheduler)
    if not sequences:
        return None
    num_context = sum(len(sequence.token_ids) for sequence in sequences)
    request_ids = [sequence.group.request.request_id for sequence in sequences]
    most = min(map(num_left, request_ids)) - 1
    available, size = scheduler._kv.num_available, scheduler._kv.block_size
    ends: list[float] = []
    ages = [0] * size  # number of sequences that need a block in step i, by i modulo the block size
    spared = [
        0
    ] * size  # those that need none in the first round, since a sequence that has re-entered may have its next block
    for sequence in sequences:
        left = sequence.kv.table.num_slots - sequence.kv.num_computed
        ages[left % size] += 1
        spared[left % size] += left // size
    while len(ends) < most and now < due:
        growth = ages[len(ends) % size] - (spared[len(ends)] if len(ends) < size else 0)
        if growth > available:
            break
        available -= growth
        now += cost.decode_seconds(len(sequences), num_context)
        num_context += len(sequences)
        ends.append(now)
    if len(ends) < _FEWEST:
        return None
    blocks_used = _advance(scheduler, sequences, len(ends))
    scheduler._step += len(ends)
    scheduler._applied_at = now
    scheduler._prefill_tokens, scheduler._decode_tokens = 0, len(sequences)
    return Leap(request_ids=request_ids, ends=ends, blocks_used=blocks_used)


def _decoding(scheduler: Scheduler) -> list[Sequence]:
    """The running sequences in the order of service if the next step gives each of them one token; otherwise empty.

    Where windows let go of blocks, steps differ in more than the blocks that they take.
    """
    roster, limits = scheduler._roster, scheduler._config.limits
    if limits.scheduling_policy not in _SIMPLE or not roster.running or scheduler._kv.by_window:
        return []
    if roster.waiting and roster.num_running < limits.max_num_seqs:
        return []
    elder = scheduler._planner.elder
    if elder is None or elder.state != "running" or any(group.wait_reason != "slots" for group in roster.waiting):
        return []
    groups = [elder, *[group for group in roster.running if group is not elder]]
    sequences: list[Sequence] = []
    for group in groups:
        if not group.prompt_shared or group.reads_output or len(group.sequences) != 1:
            return []
        sequence = group.sequences[0]
        if sequence.kv.shares_tail or sequence.num_output_tokens == 0 or group.pending(sequence) != 1:
            return []
        sequences.append(sequence)
    return sequences


def _advance(scheduler: Scheduler, sequences: list[Sequence], count: int) -> list[int]:
    """Take blocks, register them in the cache and charge tokens as single steps do; returns the used blocks."""
    kv = scheduler._kv
    size = kv.block_size
    blocks_used = []
    for step in range(count):
        full = []
        for sequence in sequences:
            end = sequence.kv.num_computed + step + 1
            if end > sequence.kv.table.num_slots:
                kv.reserve(sequence, end)
            if end % size == 0:
                full.append((sequence, end))
        blocks_used.append(held_blocks(scheduler))
        for sequence, end in full:
            _fill(sequence, end + 1)
            kv.commit(sequence, end)
        for sequence in sequences:
            if sequence.group.account is not None:
                sequence.group.account.charge_output(1)
    for sequence in sequences:
        end = sequence.kv.num_computed + count
        _fill(sequence, end + 1)
        kv.reserve(sequence, end)
        kv.advance(sequence, end)
        kv.commit(sequence, end)
    return blocks_used


def _fill(sequence: Sequence, num_tokens: int) -> None:
    """Append output tokens, which are those of its request up to the last one."""
    sequence.token_ids.extend(sequence.token_ids[-1:] * (num_tokens - len(sequence.token_ids)))
