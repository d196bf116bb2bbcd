"""Takes many like steps at once: every running sequence decodes, one prompt may get its chunks, and none can enter.

Promises: the scheduler is left as if each step had been scheduled and applied; a test compares both to the bit.

Without it a simulation would spend most of its time on steps without decisions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from quire_engine.contract.limits import SchedulerLimits
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.planner import Planner
from quire_engine.scheduling.policies import Policies
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.running_decodes import RunningDecodes
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_plan import StepPlan

_SIMPLE = ("fcfs", "priority", "wfq")  # policies that count no tokens, or each by itself
_FEWEST = 2
_FEWEST_FROM_ROWS = 8  # where sequences have to leave their rows for it, with which single steps are cheap

# What a caller knows of steps that nobody computes.
TokensLeft = Callable[[str], int]  # request id -> tokens that it is to get yet
DecodeSeconds = Callable[[int, int], float]  # decodes, tokens that they attend to together -> seconds of the step
ChunkSeconds = Callable[[int, int, int, int], float]  # tokens of a chunk, tokens before it, then as for decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """The steps taken, each with one token for each request."""

    request_ids: list[str]
    ends: list[float]
    blocks_used: list[int]  # in each step
    prompt_tokens: tuple[int, ...] = ()  # in each step; empty: no prompt is under way


class FastForward:
    """Advances the parts of one scheduler, which has no step in flight, by several steps."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policies: Policies,
        kv: KVAllocator,
        roster: Roster,
        *,
        decodes: RunningDecodes,
        planner: Planner,
    ) -> None:
        self._limits, self._policies, self._kv, self._roster = limits, policies, kv, roster
        self._decodes, self._planner = decodes, planner

    # ---- decodes alone --------------------------------------------------------------------------------------------

    def decodes(self, now: float, due: float, num_left: TokensLeft, seconds: DecodeSeconds) -> Skipped | None:
        """Take the steps of `Scheduler.skip_decodes`."""
        sequences = self._decoding()
        if not sequences:
            return None
        request_ids = [sequence.group.request.request_id for sequence in sequences]
        most, fewest = min(map(num_left, request_ids)) - 1, _FEWEST_FROM_ROWS if len(self._decodes) else _FEWEST
        if most < fewest:
            return None
        ends = self._ends(sequences, most, now, due, seconds)
        if len(ends) < fewest:
            return None
        with self._decodes.apart(sequences):
            blocks_used = self._advance(sequences, len(ends))
        self._planner.note_skipped(len(ends))
        for began, ended in pairwise([now, *ends][-3:]):  # of equal steps the newest two count
            self._policies.prices.learn(prompt_tokens=0, num_decodes=len(sequences), seconds=ended - began)
        return Skipped(request_ids=request_ids, ends=ends, blocks_used=blocks_used)

    def _decoding(self) -> list[Sequence]:
        """The running sequences in the order of service if the next step gives each of them one token; otherwise empty.

        Where windows let go of blocks, steps differ in more than the blocks that they take.
        """
        roster, limits, elder = self._roster, self._limits, self._planner.elder
        if limits.scheduling_policy not in _SIMPLE or not roster.running or self._kv.by_window:
            return []
        if roster.waiting and roster.num_running < limits.max_num_seqs:
            return []
        if elder is None or elder.state != "running" or any(group.wait_reason != "slots" for group in roster.waiting):
            return []
        sequences: list[Sequence] = []
        for group in self._served(elder):
            if not group.prompt_shared or group.reads_output or len(group.sequences) != 1:
                return []
            sequence = group.sequences[0]
            if sequence.kv.shares_tail or sequence.num_output_tokens == 0 or group.pending(sequence) != 1:
                return []
            sequences.append(sequence)
        return sequences

    def _ends(
        self, sequences: list[Sequence], most: int, now: float, due: float, seconds: DecodeSeconds
    ) -> list[float]:
        """The ends of the steps that begin before `due` and find free blocks, at most `most`."""
        num_context = sum(sequence.num_known for sequence in sequences)
        available, size = self._kv.num_available, self._kv.block_size
        ages = [0] * size  # number of sequences that need a block in step i, by i modulo the block size
        # Those that need none in the first round, since a sequence that has re-entered may have its next block.
        spared = [0] * size
        for sequence in sequences:
            left = sequence.kv.table.num_slots - sequence.kv.num_computed
            ages[left % size] += 1
            spared[left % size] += left // size
        ends: list[float] = []
        while len(ends) < most and now < due:
            growth = ages[len(ends) % size] - (spared[len(ends)] if len(ends) < size else 0)
            if growth > available:
                break
            available -= growth
            now += seconds(len(sequences), num_context)
            num_context += len(sequences)
            ends.append(now)
        return ends

    def _advance(self, sequences: list[Sequence], count: int) -> list[int]:
        """Take blocks, register them in the cache and charge tokens as single steps do; returns the used blocks."""
        kv = self._kv
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
            blocks_used.append(kv.num_used)
            for sequence, end in full:
                _fill(sequence, end + 1)
                kv.commit(sequence, end)
            _charge_output(sequences)
        for sequence in sequences:
            end = sequence.kv.num_computed + count
            _fill(sequence, end + 1)
            kv.reserve(sequence, end)
            kv.advance(sequence, end)
            kv.commit(sequence, end)
        return blocks_used

    # ---- beside a prompt ------------------------------------------------------------------------------------------

    def chunks(self, now: float, due: float, num_left: TokensLeft, seconds: ChunkSeconds) -> Skipped | None:
        """Take the steps of `Scheduler.skip_chunks`."""
        found = self._decoding_beside_prompt()
        if found is None:
            return None
        group, decodes = found
        prompt, request_ids = group.leader, [sequence.group.request.request_id for sequence in decodes]
        most = min(map(num_left, request_ids), default=sys.maxsize) - 1
        if len(self._decodes):
            chunks = group.pending(prompt) // max(self._planner.lone_chunk(group, len(decodes)), 1)
            if min(most, chunks) < _FEWEST_FROM_ROWS:
                return None
        with self._decodes.apart(decodes):
            return self._take_chunks(group, decodes, now, most=most, due=due, seconds=seconds)

    def _take_chunks(
        self, group: Group, decodes: list[Sequence], now: float, *, most: int, due: float, seconds: ChunkSeconds
    ) -> Skipped | None:
        """Take at most `most` chunks of the group's prompt, each beside one token of every decode."""
        prompt, kv = group.leader, self._kv
        num_context = sum(sequence.num_known for sequence in decodes)
        ends: list[float] = []
        blocks_used, prompt_tokens = [], []
        while len(ends) < most and now < due:
            chunk = self._planner.lone_chunk(group, len(decodes))
            growth = sum([one.kv.num_computed + len(ends) + 1 > one.kv.table.num_slots for one in decodes])
            if not 0 < chunk < group.pending(prompt) or growth > kv.num_available:
                break
            began, now = now, now + seconds(chunk, prompt.kv.num_computed, len(decodes), num_context)
            blocks_used.append(self._take_chunk(prompt, chunk, decodes, len(ends)))
            _charge_output(decodes)
            for learner in (self._policies.itl, self._policies.prices):
                learner.learn(prompt_tokens=chunk, num_decodes=len(decodes), seconds=now - began)
            num_context += len(decodes)
            ends.append(now)
            prompt_tokens.append(chunk)
        if not ends:
            return None
        self._end_chunks(group, decodes, len(ends))
        request_ids = [sequence.group.request.request_id for sequence in decodes]
        return Skipped(request_ids=request_ids, ends=ends, blocks_used=blocks_used, prompt_tokens=tuple(prompt_tokens))

    def _decoding_beside_prompt(self) -> tuple[Group, list[Sequence]] | None:
        """The group whose prompt is under way, and all others' sequences, in the order of service.

        Each of those gets one token in the next step. None where that may be another one.
        """
        elder = self._planner.elder
        if self._limits.scheduling_policy not in _SIMPLE or self._roster.waiting or self._kv.by_window:
            return None
        if elder is None or elder.state != "running":
            return None
        prompt: Group | None = None
        sequences: list[Sequence] = []
        for group in self._served(elder):
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

    def _take_chunk(self, prompt: Sequence, chunk: int, decodes: list[Sequence], step: int) -> int:
        """Take one step: blocks, the prompt's charge, full blocks in the batch's order; returns the used blocks."""
        kv, elder = self._kv, self._planner.elder
        plan = StepPlan(self._planner.step + step + 1, 0, elder)
        plan.slices[prompt] = chunk
        for sequence in decodes:
            if sequence.kv.num_computed + step + 1 > sequence.kv.table.num_slots:
                kv.reserve(sequence, sequence.kv.num_computed + step + 1)
        end = prompt.kv.num_computed + chunk
        kv.reserve(prompt, end)
        self._planner.accounts.charge(plan)
        kv.unpin()
        kv.advance(prompt, end)
        used = kv.num_used
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

    def _end_chunks(self, group: Group, decodes: list[Sequence], count: int) -> None:
        """Bring the decodes beside `count` chunks of the group's prompt up to their last step."""
        kv = self._kv
        for sequence in decodes:
            end = sequence.kv.num_computed + count
            _fill(sequence, end + 1)
            kv.reserve(sequence, end)
            kv.advance(sequence, end)
            if end % kv.block_size:
                kv.commit(sequence, end)
        self._planner.note_skipped(count, prompt=group)

    # ---- both -----------------------------------------------------------------------------------------------------

    def _served(self, elder: Group) -> list[Group]:
        """The running groups in the order of service."""
        return [elder, *[group for group in self._roster.running if group is not elder]]


def _charge_output(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if sequence.group.account is not None:
            sequence.group.account.charge_output(1)


def _fill(sequence: Sequence, num_tokens: int) -> None:
    """Append output tokens, which are those of its request up to the last one."""
    sequence.token_ids.extend(sequence.token_ids[-1:] * (num_tokens - len(sequence.token_ids)))
