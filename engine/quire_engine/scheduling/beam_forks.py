"""Applies a step's log-probabilities to a group of beams: forks, prunes and finishes them.

The beams of a group advance together. Beams share blocks until they write (copy on write); a pruned beam frees its
blocks at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire_engine.contract.batch import SampledToken, ScheduledSequence
from quire_engine.contract.invariants import InvariantViolation
from quire_engine.contract.types import NO_CANDIDATE, TokenLogprobs, TokenOutput
from quire_engine.scheduling.beams import BeamSearch
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.log.step_log import StepLog
from quire_engine.scheduling.outputs import beam_output, error_outputs
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group


class BeamForks:
    """A group's sequences are lanes: each computes a beam, and gets another one when its own is pruned."""

    def __init__(self, kv: KVAllocator, roster: Roster, log: StepLog | None) -> None:
        self._kv = kv
        self._roster = roster
        self._log = log

    def take(
        self,
        group: Group,
        item: ScheduledSequence,
        samples: Mapping[int, tuple[SampledToken, ...]],
        step_id: int,
        now: float,
    ) -> list[TokenOutput]:
        """Take the candidates that a slice computed; returns the group's outputs when the search ends with them."""
        beams = group.beams
        if beams is None or not item.wants_sample:
            return []
        if group.first_token is None:
            group.note_first_token(now)
        lanes = [(item.choice, item.sequence_id), *((fork.choice, fork.sequence_id) for fork in item.forks)]
        if group.account is not None:
            group.account.charge_output(len(lanes))  # each lane has computed a token, whichever beams survive
        for lane, sequence_id in lanes:
            sample = samples[sequence_id][0]
            if sample.error is not None:
                return self._fail(group, sample.error)
            if beams.offer(lane, _logprobs_of(sample)):
                return self._take_step(group, beams, step_id)
        return []

    def _take_step(self, group: Group, beams: BeamSearch, step_id: int) -> list[TokenOutput]:
        """Every lane has offered its candidates: rank them, then end the search or fork the beams."""
        continuations = beams.advance()
        wanted = group.request.n
        if continuations is None or (beams.is_over and len(beams.finished) < wanted):
            return self._fail(group, f"{NO_CANDIDATE} for {group.request.num_sequences} beams")
        if beams.is_over:
            outputs = [beam_output(group, found, choice) for choice, found in enumerate(beams.finished[:wanted])]
            self._roster.end_all(group)
            return outputs
        lanes = self._fork(group, continuations)
        beams.assign(lanes)
        group.resume_beams()
        if self._log is not None:
            parent_of = dict(zip(lanes, (parent for parent, _ in continuations), strict=True))
            self._log.searched(group, step_id, tuple(parent_of[lane] for lane in range(len(lanes))))
        return []

    def _fork(self, group: Group, continuations: list[tuple[int, int]]) -> list[int]:
        """Assign a lane to each continuation: a beam's first one keeps its lane, others get lanes of pruned beams."""
        lanes = group.sequences
        pruned = iter([lane for lane in range(len(lanes)) if lane not in {parent for parent, _ in continuations}])
        kept: set[int] = set()
        assigned: list[int] = []
        for parent, token_id in continuations:
            source = lanes[parent]
            lane = next(pruned) if parent in kept else parent
            if lane != parent:
                if self._log is not None:
                    self._log.pruned(lanes[lane])
                self._kv.release(lanes[lane])
                self._kv.fork(source, lanes[lane], source.kv.num_computed)
            kept.add(parent)
            assigned.append(lane)
            lanes[lane].extend_beam(source.token_ids[: source.kv.num_computed], token_id)
        return assigned

    def _fail(self, group: Group, message: str) -> list[TokenOutput]:
        return error_outputs(group, self._roster.end_all(group), message)


def _logprobs_of(sample: SampledToken) -> TokenLogprobs:
    if sample.logprobs is None:
        raise InvariantViolation("the executor did not tell the log-probabilities that it was asked for")
    return sample.logprobs
