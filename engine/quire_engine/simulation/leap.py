"""Takes many like steps at once: every running sequence decodes, one prompt may get its chunks, and none can enter.

Promises: the scheduler is left as if each step had been scheduled and applied; a test compares both to the bit.

Without it a simulation would spend most of its time on steps without decisions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from quire_engine.cost_model import CostModel, StepSizes
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_plan import StepPlan

_SIMPLE = ("fcfs", "priority", "wfq")  # policies that count no tokens, or each by itself
_FEWEST = 2
_FEWEST_OF_COLUMNS = 8  # where sequences have to leave the columns for it, in which single steps are cheap


@dataclass(frozen=True, slots=True, kw_only=True)
class Leap:
    """The steps taken, each with one token for each request."""

    request_ids: list[str]
    ends: list[float]
    blocks_used: list[int]  # in each step
    prompt_tokens: tuple[int, ...] = ()  # in each step; empty: no prompt is under way


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
    request_ids = [sequence.group.request.request_id for sequence in sequences]
    most, fewest = min(map(num_left, request_ids)) - 1, _FEWEST_OF_COLUMNS if len(scheduler._columns) else _FEWEST
    if most < fewest:
        return None
    num_context = sum(sequence.num_known for sequence in sequences)
    available, size = scheduler._kv.num_available, scheduler._kv.block_size
    ends: list[float] = []
    first_began = now
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
    if len(ends) < fewest:
        return None
    for sequence in sequences:
        sequence.settle()
    blocks_used = _advance(scheduler, sequences, len(ends))
    _welcome(scheduler, sequences)
    scheduler._step += len(ends)
    scheduler._applied_at = now
    for began, ended in pairwise([first_began, *ends][-3:]):  # of equal steps the newest two count
        scheduler._capacity.learn(prompt_tokens=0, num_decodes=len(sequences), seconds=ended - began)
    scheduler._prefill_tokens, scheduler._decode_tokens = 0, len(sequences)
    return Leap(request_ids=request_ids, ends=ends, blocks_used=blocks_used)


def prompt_leap(
    scheduler: Scheduler, cost: CostModel, now: float, due: float, num_left: Callable[[str], int]
) -> Leap | None:
    """Take, like `leap`, all chunks but the last of the one prompt beside decodes, while no request waits.

    None if not even one step is like that.
    """
    found = _decoding_beside_prompt(scheduler)
    if found is None:
        return None
    group, decodes = found
    prompt, kv, size = group.leader, scheduler._kv, scheduler._kv.block_size
    request_ids = [sequence.group.request.request_id for sequence in decodes]
    most = min(map(num_left, request_ids), default=sys.maxsize) - 1
    if len(scheduler._columns):
        chunks = group.pending(prompt) // max(_chunk(scheduler, group, len(decodes)), 1)
        if min(most, chunks) < _FEWEST_OF_COLUMNS:
            return None
        for sequence in decodes:
            sequence.settle()
    num_context = sum(sequence.num_known for sequence in decodes)
    ends: list[float] = []
    blocks_used, prompt_tokens = [], []
    while len(ends) < most and now < due:
        chunk = _chunk(scheduler, group, len(decodes))
        growth = sum([one.kv.num_computed + len(ends) + 1 > one.kv.table.num_slots for one in decodes])
        if not 0 < chunk < group.pending(prompt) or growth > kv.num_available:
            break
        sizes = _sizes(chunk, prompt.kv.num_computed, len(decodes), num_context)
        began, now = now, now + cost.seconds_of(sizes)
        blocks_used.append(_take_chunk(scheduler, prompt, chunk, decodes, len(ends)))
        for sequence in decodes:
            if sequence.group.account is not None:
                sequence.group.account.charge_output(1)
        for learner in (scheduler._itl, scheduler._capacity):
            learner.learn(prompt_tokens=chunk, num_decodes=len(decodes), seconds=now - began)
        num_context += len(decodes)
        ends.append(now)
        prompt_tokens.append(chunk)
    if not ends:
        _welcome(scheduler, decodes)
        return None
    for sequence in decodes:
        end = sequence.kv.num_computed + len(ends)
        _fill(sequence, end + 1)
        kv.reserve(sequence, end)
        kv.advance(sequence, end)
        if end % size:
            kv.commit(sequence, end)
    _welcome(scheduler, decodes)
    scheduler._planner._turns.first([group], [])
    scheduler._step += len(ends)
    scheduler._applied_at = now
    scheduler._prefill_tokens, scheduler._decode_tokens = prompt_tokens[-1], len(decodes)
    return Leap(request_ids=request_ids, ends=ends, blocks_used=blocks_used, prompt_tokens=tuple(prompt_tokens))


def _welcome(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    """Put into the columns the sequences that single steps would have there."""
    for sequence in sequences:
        if sequence.columns is None and sequence.group.is_plain and sequence.group is not scheduler._planner.elder:
            scheduler._columns.welcome(sequence, scheduler._roster.num_running)


def _decoding_beside_prompt(scheduler: Scheduler) -> tuple[Group, list[Sequence]] | None:
    """The group whose prompt is under way, and all others' sequences, each of which gets one token in the next step.

    In the order of service. None where the next step may be another one.
    """
    roster, limits = scheduler._roster, scheduler._config.limits
    elder = scheduler._planner.elder
    if limits.scheduling_policy not in _SIMPLE or roster.waiting or scheduler._kv.by_window:
        return None
    if elder is None or elder.state != "running":
        return None
    prompt: Group | None = None
    sequences: list[Sequence] = []
    for group in [elder, *[group for group in roster.running if group is not elder]]:
        sequence = group.leader
        if len(group.sequences) != 1 or group.reads_output or sequence.kv.shares_tail or group.is_batch:
            return None
        pending = group.pending(sequence)
        if sequence.num_output_tokens:
            if pending != 1:
                return None
            sequences.append(sequence)
        elif prompt is not None or pending < 2 or group.num_computed_before:
            return None
        else:
            prompt = group
    return None if prompt is None else (prompt, sequences)


def _chunk(scheduler: Scheduler, group: Group, num_decodes: int) -> int:
    """The prompt's tokens in the next step, as `Planner.plan` assigns them: claim, chunk, rest."""
    planner, limits = scheduler._planner, scheduler._config.limits
    pending, budget, planned = group.pending(group.leader), limits.max_num_batched_tokens - num_decodes, 0
    if group is planner.elder:
        planned = min(pending, limits.min_chunk)
        budget -= planned
    budget = min(budget, scheduler._itl.prompt_tokens(num_decodes))
    for others in (True, False):
        left = pending - planned
        size = planner._policies.chunk.size(pending=left, planned=planned, budget=budget, others=others) if left else 0
        if size > 0:
            planned, budget = planned + size, budget - size
    return planned


def _sizes(chunk: int, start: int, num_decodes: int, num_context: int) -> StepSizes:
    """The sizes of a step with one chunk; a chunk of one token attends as a decode does."""
    if chunk == 1:
        return StepSizes(1 + num_decodes, num_decodes, num_context + start + 1, 0)
    return StepSizes(chunk + num_decodes, num_decodes, num_context, chunk * start)


def _take_chunk(scheduler: Scheduler, prompt: Sequence, chunk: int, decodes: list[Sequence], step: int) -> int:
    """One step: takes blocks, charges the prompt, registers full blocks in the batch's order; returns used blocks."""
    kv, elder = scheduler._kv, scheduler._planner.elder
    plan = StepPlan(scheduler._step + step + 1, 0, elder)
    plan.slices[prompt] = chunk
    for sequence in decodes:
        if sequence.kv.num_computed + step + 1 > sequence.kv.table.num_slots:
            kv.reserve(sequence, sequence.kv.num_computed + step + 1)
    end = prompt.kv.num_computed + chunk
    kv.reserve(prompt, end)
    scheduler._planner.accounts.charge(plan)
    kv.unpin()
    kv.advance(prompt, end)
    used = held_blocks(scheduler)
    if prompt.group is elder:
        kv.commit(prompt, end)
    for sequence in decodes:
        own = sequence.kv.num_computed + step + 1
        if own % kv.block_size == 0:
            _fill(sequence, own + 1)
            kv.commit(sequence, own)
    if prompt.group is not elder:
        kv.commit(prompt, end)
    return used


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
