"""One step's plan while it is made: the slices, the copies to make before them, and the decisions.

The budget is never exceeded. A preempted group loses all its slices. Each decision about a group is recorded. Plain
decodes have no slices here but rows in `RunningDecodes`, of a token each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from quire_engine.contract.batch import Batch, Fork, ScheduledSequence
from quire_engine.contract.decodes import BatchInColumns, Decodes
from quire_engine.scheduling.blocks import NO_MOVES, Moves
from quire_engine.scheduling.sequence import Group, Sequence

DecisionKind = Literal["elder", "enters", "waits", "preempted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision about one group in a step. Slices are the plan itself and not recorded here."""

    kind: DecisionKind
    request_id: str
    reason: str = ""  # "waits": a WaitReason; "preempted": a PreemptionCause
    num_tokens: int = 0  # "enters": cached or swapped-in tokens; "preempted": swapped-out tokens
    by: str = ""  # "preempted": the request that needed the blocks or slots; empty where it was this one itself


class StepPlan:
    """The slices, in the order in which they were first assigned, which is the order of the batch."""

    __slots__ = (
        *("_copies", "budget", "decisions", "decodes", "drafts", "elder", "num_preempted", "num_rows", "slices"),
        "step",
    )

    def __init__(self, step: int, budget: int, elder: Group | None = None) -> None:
        self.step = step
        self.budget = budget
        self.elder = elder  # the group that is not preempted in this step
        self.decisions: list[Decision] = []
        self.slices: dict[Sequence, int] = {}
        self.drafts: dict[Sequence, tuple[int, ...]] = {}  # guessed tokens behind a slice, which are no part of it
        self.num_preempted = 0
        self.num_rows = 0  # of decodes, once they are served
        self.decodes: tuple[Sequence, ...] = ()  # those with slices that were served with the rows
        self._copies: dict[Sequence, tuple[tuple[int, int], ...]] = {}

    def assign(self, sequence: Sequence, num_tokens: int, copies: tuple[tuple[int, int], ...] = ()) -> None:
        """Add tokens to a sequence's slice."""
        self.slices[sequence] = self.slices.get(sequence, 0) + num_tokens
        self.budget -= num_tokens
        if copies:
            self._copies[sequence] = copies

    def serve_rows(self, num_rows: int) -> None:
        """Give each row a token of the step."""
        self.num_rows = num_rows
        self.budget -= num_rows

    def end_decodes(self) -> None:
        """All decodes are served: what is assigned from now on comes behind them."""
        self.decodes = tuple(self.slices)

    def note(self, kind: DecisionKind, group: Group, *, reason: str = "", num_tokens: int = 0, by: str = "") -> None:
        """Record a decision for the step log."""
        request_id = group.request.request_id
        self.decisions.append(Decision(kind=kind, request_id=request_id, reason=reason, num_tokens=num_tokens, by=by))

    def add_drafts(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Compute guessed tokens behind a sequence's decode."""
        self.drafts[sequence] = token_ids
        self.budget -= len(token_ids)

    def limit(self, num_tokens: int) -> None:
        """Limit the rest of the budget."""
        self.budget = min(self.budget, num_tokens)

    def take_back(self, group: Group, *, num_rows: int = 0) -> dict[int, int]:
        """Remove the slices, copies and rows of a group that is preempted; returns the copies' sources by target."""
        self.num_preempted += 1
        if self.num_rows:
            self.num_rows -= num_rows
            self.budget += num_rows
        copied_from: dict[int, int] = {}
        for sequence in group.sequences:
            self.budget += self.slices.pop(sequence, 0)
            for source, target in self._copies.pop(sequence, ()):
                copied_from[target] = source
        return copied_from

    @property
    def num_streams(self) -> int:
        """Sequences with output that get their next token."""
        return self.num_rows + sum(
            1 for sequence, size in self.slices.items() if size == 1 and sequence.num_output_tokens > 0
        )

    @property
    def num_recomputed(self) -> int:
        """Tokens of the slices that a preemption has lost: they were computed before."""
        return sum(
            max(0, min(sequence.kv.num_computed + size, sequence.group.num_computed_before) - sequence.kv.num_computed)
            for sequence, size in self.slices.items()
            if sequence.group.num_computed_before
        )

    def planned(self, group: Group) -> int:
        """Tokens that were assigned to the group."""
        return sum(self.slices.get(sequence, 0) for sequence in group.computing)

    def batch(
        self,
        step_id: int,
        moves: Moves = NO_MOVES,
        released: tuple[int, ...] = (),
        rows: tuple[Decodes, list[int]] | None = None,
    ) -> Batch:
        """The plan as a `Batch` for the executor; `rows`: if there are any, and for each slice how many come before."""
        drafts = self.drafts
        items = tuple(
            [_item(sequence, num_tokens, drafts.get(sequence, ())) for sequence, num_tokens in self.slices.items()]
        )
        num_tokens = sum(self.slices.values()) + sum(map(len, drafts.values()))
        num_decodes = sum([item.is_decode for item in items])
        copies = tuple(chain.from_iterable(self._copies.values()))
        if rows is None:
            return Batch(
                step_id=step_id,
                items=items,
                num_tokens=num_tokens,
                num_decodes=num_decodes,
                swap_out=moves.swap_out,
                swap_in=moves.swap_in,
                swap_keys=moves.swap_keys,
                copies=copies,
                released=released,
            )
        decodes, behind = rows
        return BatchInColumns(
            decodes=decodes,
            others=items,
            behind=behind,
            step_id=step_id,
            num_tokens=num_tokens + len(decodes),
            num_decodes=num_decodes + len(decodes),
            swap_out=moves.swap_out,
            swap_in=moves.swap_in,
            swap_keys=moves.swap_keys,
            copies=copies,
            released=released,
        )


def _item(sequence: Sequence, num_tokens: int, drafts: tuple[int, ...]) -> ScheduledSequence:
    group, start = sequence.group, sequence.kv.num_computed
    request = group.request
    wants_sample = start + num_tokens == len(sequence.token_ids) and group.max_new_tokens > 0
    return ScheduledSequence(
        sequence_id=sequence.sequence_id,
        choice=sequence.choice,
        run=group.num_preemptions,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=_output(sequence) if group.reads_output else (),
        token_ids=(*sequence.token_ids[start : start + num_tokens], *drafts),
        start=start,
        num_drafts=len(drafts),
        block_ids=sequence.kv.table.block_ids,
        other_block_ids=tuple([table.block_ids for table in sequence.kv.tables[1:]]),
        wants_sample=wants_sample,
        wants_prompt_logprobs=group.prompt_logprobs_due and start < sequence.num_prompt_tokens - 1,
        forks=_forks(group) if wants_sample and not group.prompt_shared else (),
        sampling=group.sampling,
        stop=request.stop,
        adapter=group.adapter,
        pooling=request.pooling if request.pooling != "last" or start + num_tokens == group.num_prompt_tokens else "",
    )


def _output(sequence: Sequence) -> tuple[int, ...]:
    return tuple(sequence.token_ids[sequence.num_prompt_tokens :])


def _forks(group: Group) -> tuple[Fork, ...]:
    """The followers without output: their first token is sampled from the leader's row."""
    return tuple(
        Fork(sequence_id=follower.sequence_id, choice=follower.choice)
        for follower in group.followers()
        if follower.num_output_tokens == 0
    )
