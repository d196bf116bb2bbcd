"""Applies the results of steps: tokens, scores and errors become outputs, sequences end or go on.

Each accepted choice ends once. Several tokens of a choice, and what other choices get from its row, come in order.
"""

from __future__ import annotations

from quire_engine.contract.batch import Batch, ScheduledSequence, StepResult, num_accepted
from quire_engine.contract.token_columns import Outputs
from quire_engine.contract.types import NON_FINITE, FinishReason, TokenOutput
from quire_engine.scheduling.beam_forks import BeamForks
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.log.step_log import StepLog
from quire_engine.scheduling.outputs import (
    error_output,
    error_outputs,
    progress_output,
    prompt_only_output,
    token_output,
)
from quire_engine.scheduling.planner import Planner
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.running_decodes import RunningDecodes
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.speculation import Speculation
from quire_engine.scheduling.swapping import Swapping

MAX_STARVED = 3  # preemptions of one request for lack of device memory, before it fails


class StepResults:
    """Brings what a step has computed to the sequences that it was computed for, as far as they are there."""

    def __init__(
        self,
        kv: KVAllocator,
        roster: Roster,
        *,
        decodes: RunningDecodes,
        planner: Planner,
        log: StepLog | None,
        speculation: Speculation | None,
        swapping: Swapping | None,
    ) -> None:
        self._kv, self._roster, self._decodes, self._swapping = kv, roster, decodes, swapping
        self._planner, self._log, self._speculation = planner, log, speculation
        self._beam_forks = BeamForks(kv, roster, log)

    def apply(self, batch: Batch, result: StepResult, now: float) -> Outputs:
        """The outputs of a step. Results for sequences that ended or were preempted since its plan are ignored."""
        if result.non_finite:
            self._invalidate_non_finite(batch, result)
        taken = self._decodes.take(batch, result)
        if taken is None:
            return Outputs(
                others=[output for item in batch.items for output in self._apply_item(item, batch, result, now)]
            )
        others: list[TokenOutput] = []
        behind: list[int] = []
        for num_before, item in taken.rest:
            others += self._apply_item(item, batch, result, now)
            behind += [num_before] * (len(others) - len(behind))
        return Outputs(others=others, streams=taken.streams, ids=taken.ids, behind=tuple(behind))

    def note_end(self, sequence: Sequence) -> None:
        """A choice has all its tokens: later expectations and guesses are learned from it."""
        self._planner.admission.note_end(sequence)
        if self._speculation is not None:
            self._speculation.note_end(sequence)

    def fail_all(self, group: Group, message: str) -> list[TokenOutput]:
        """End a request with an error of each choice that is unfinished."""
        return error_outputs(group, self._roster.end_all(group), message)

    def _apply_item(self, item: ScheduledSequence, batch: Batch, result: StepResult, now: float) -> list[TokenOutput]:
        """Apply what one slice has brought; returns its outputs."""
        sequence = self._roster.sequences.get(item.sequence_id)
        if sequence is None or item.run != sequence.group.num_preemptions:
            return []
        if item.sequence_id in result.errors:
            return self._fail_slice(sequence, item, result.errors[item.sequence_id])
        if item.sequence_id in result.starved:
            return self._preempt_starved(sequence.group, batch.step_id)
        if item.num_drafts:
            return [self._take_tokens(sequence, item, result, now)]
        return self._apply_computed(sequence, item, batch, result, now)

    def _apply_computed(
        self, sequence: Sequence, item: ScheduledSequence, batch: Batch, result: StepResult, now: float
    ) -> list[TokenOutput]:
        """Apply a slice that was computed and has no drafts."""
        if self._decodes.take_one(sequence, item, result):
            samples = result.samples[item.sequence_id]
            return [token_output(sequence, samples, (samples[0].token_id,), None)]
        self._kv.commit(sequence, item.end)
        if item.wants_prompt_logprobs:
            sequence.group.add_prompt_logprobs(result.prompt_logprobs[item.sequence_id])
        if item.pooling and sequence.group.pooled is not None:
            sequence.group.pooled.add(result.pooled[item.sequence_id])
        if sequence.group.beams is not None:
            return self._beam_forks.take(sequence.group, item, result.samples, batch.step_id, now)
        outputs: list[TokenOutput] = []
        if item.wants_sample:
            forks = [self._roster.sequences[fork.sequence_id] for fork in item.forks]
            outputs = [self._take_tokens(each, item, result, now) for each in (sequence, *forks)]
        elif sequence.group.max_new_tokens == 0 and item.end == item.num_prompt_tokens:
            outputs = self._finish_prompt_only(sequence.group, now)
        elif sequence.group.request.tells_progress and not sequence.has_output and item.end < item.num_prompt_tokens:
            outputs = [progress_output(sequence, item.end, now)]
        return outputs

    def _take_tokens(self, sequence: Sequence, item: ScheduledSequence, result: StepResult, now: float) -> TokenOutput:
        """Store the tokens sampled behind an item, up to the first one that ends the sequence.

        Tokens after that one are dropped. Several tokens come only where the next plan waits for results, so that
        nothing of the sequence is in flight then. Drafts that are right are computed, forced tokens are not; what a
        rejected draft has written is never read, since a later step writes there first.
        """
        samples, at = result.samples[sequence.sequence_id], item.end - item.num_drafts
        accepted = num_accepted(samples)
        predicted = None
        if self._speculation is not None and item.num_drafts:
            predicted = self._speculation.note(sequence, item.num_drafts, accepted)
        if samples[-1].error is not None:
            self._roster.end(sequence)
            return error_output(sequence, samples[-1].error)
        group, token_ids = sequence.group, sequence.token_ids
        if group.first_token is None:
            group.note_first_token(now)
        most = sequence.num_prompt_tokens + group.max_new_tokens
        taken: list[int] = []
        finish: FinishReason | None = None
        for sample in samples:
            taken.append(sample.token_id)
            if sample.token_id in group.stop_token_ids:
                finish = "stop"
            elif at + len(taken) == most:
                finish = "length"
            if finish is not None:
                break
        token_ids[at : at + 1] = taken
        if item.num_drafts:
            num_computed = at + min(accepted, len(taken) - 1)
            self._kv.take_back(sequence, num_computed)
            self._kv.commit(sequence, num_computed)
        if finish is not None:
            self.note_end(sequence)
            self._roster.end(sequence)
        if group.account is not None:
            group.account.charge_output(len(taken))
        num_forced = max(0, len(taken) - 1 - accepted)
        if sequence.num_forced != num_forced:
            sequence.note_forced(num_forced)
        output = token_output(sequence, samples, tuple(taken), finish, predicted)
        self._decodes.welcome(sequence)
        return output

    def _finish_prompt_only(self, group: Group, now: float) -> list[TokenOutput]:
        group.note_first_token(now)
        return [prompt_only_output(sequence) for sequence in self._roster.end_all(group)]

    def _fail_slice(self, sequence: Sequence, item: ScheduledSequence, message: str) -> list[TokenOutput]:
        """A prompt slice that fails ends every choice that waits for it; a beam's slice ends the whole search."""
        if item.start < item.num_prompt_tokens or sequence.group.beams is not None:
            return self.fail_all(sequence.group, message)
        self._roster.end(sequence)
        return [error_output(sequence, message)]

    def _invalidate_non_finite(self, batch: Batch, result: StepResult) -> None:
        """Move each sequence of `result.non_finite` to `result.starved`, or the second time to `result.errors`.

        A row of such a sequence held NaN or infinity, so no other request may match the blocks that the sequence read
        and wrote. A starved sequence is computed again, once: a cached prefix that was wrong is then not found any
        more. A group that has swapped out one of those blocks is computed again too. A request that gets a non-finite
        value again ends with an error. Blocks need not be cleared: attention never reads a position beyond a
        sequence's end, and every position before it is written before it is read.
        """
        for item in batch.items:
            sequence = self._roster.sequences.get(item.sequence_id)
            if sequence is None or item.run != sequence.group.num_preemptions:
                continue
            concerned = [item.sequence_id, *(fork.sequence_id for fork in item.forks)]
            if result.non_finite.isdisjoint(concerned):
                continue
            group = sequence.group
            self._decodes.leave(group)
            self._kv.invalidate(group.sequences)
            for sequence_id in concerned:  # replaced by the entry that is made below
                result.samples.pop(sequence_id, None)
                result.errors.pop(sequence_id, None)
            if group.num_starved:
                result.errors[item.sequence_id] = NON_FINITE
            else:
                result.starved.add(item.sequence_id)
        if self._swapping is not None:
            self._swapping.drop_lost(self._roster.live.values())

    def _preempt_starved(self, group: Group, step: int) -> list[TokenOutput]:
        """Preempt a group for which the device had no memory; after `MAX_STARVED` such preemptions it fails."""
        group.note_starved()
        if group.num_starved > MAX_STARVED:
            return self.fail_all(group, "the device has no memory left to compute this request")
        self._roster.preempt(group, "device")
        if self._log is not None:
            self._log.starved(group, step)
        return []
