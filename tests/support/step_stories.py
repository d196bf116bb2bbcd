"""Batches as a scheduler would make them, told twice: to a runner that is waited for, and to one that runs ahead.

Promises: a story depends on its seed and on the tokens sampled, so both runners are told the same; blocks are
used again as soon as they may be, while steps that read them are in flight. Must not know: how either computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from quire_engine.contract.batch import PENDING, Batch, Fork, ScheduledSequence, StepResult
from quire_engine.contract.types import Pooling, SamplingParams, StopParams

Execute = Callable[[Batch], StepResult]


@dataclass(slots=True)
class Member:
    """A sequence of the story."""

    sequence_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    pooling: Pooling = ""
    choice: int = 0
    forks: tuple[Fork, ...] = ()
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def known(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One step and its right result."""

    batch: Batch
    result: StepResult


class Story:
    """Runs members through `execute`, at most `chunk` tokens of each a step, and remembers every step."""

    def __init__(self, execute: Execute, *, num_blocks: int, block_size: int = 16, chunk: int = 11, seed: int = 0):
        self._execute, self._block_size, self._chunk = execute, block_size, chunk
        self._source = random.Random(seed)
        self._free = list(range(num_blocks))
        self._source.shuffle(self._free)
        self._leaving: list[int] = []  # blocks of who failed, in which the next step writes once more
        self.members: list[Member] = []
        self.steps: list[Told] = []

    def add(self, sequence_id: int, prompt: Sequence[int], num_tokens: int, *, forks: Sequence[int] = (), **sampling):
        """A request for `num_tokens` more. `forks` are the sequence ids of its further choices."""
        self.members.append(
            Member(
                sequence_id=sequence_id,
                prompt=tuple(prompt),
                sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
                max_new_tokens=num_tokens,
                forks=tuple(Fork(sequence_id=other, choice=i + 1) for i, other in enumerate(forks)),
            )
        )

    def pool(self, sequence_id: int, prompt: Sequence[int], pooling: Pooling):
        """A request for the prompt's vector."""
        member = Member(
            sequence_id=sequence_id,
            prompt=tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
            max_new_tokens=0,
            pooling=pooling,
        )
        self.members.append(member)

    def preempt(self, sequence_id: int) -> None:
        """Its blocks go back, and the next steps compute it again, in others."""
        (member,) = (m for m in self.members if m.sequence_id == sequence_id)
        self._give_back(member)
        member.computed = 0
        self._source.shuffle(self._free)

    def step(self) -> StepResult:
        items = tuple(self._item(member) for member in self.members)
        copies = tuple(pair for member in self.members for pair in member.copies)
        batch = Batch(
            step_id=len(self.steps),
            items=items,
            num_tokens=sum(item.num_tokens for item in items),
            num_decodes=sum(item.is_decode for item in items),
            copies=copies,
        )
        result = self._execute(batch)
        self.steps.append(Told(batch=batch, result=result))
        self._free, self._leaving = self._free + self._leaving, []
        for member, item in zip(list(self.members), items, strict=True):
            self._apply(member, item, result)
        return result

    def run(self) -> None:
        while self.members:
            self.step()

    def _item(self, member: Member) -> ScheduledSequence:
        known = member.known
        end = min(len(known), member.computed + self._chunk)
        while len(member.blocks) * self._block_size < end:
            member.blocks.append(self._free.pop())
        at_end = end == len(known)
        return ScheduledSequence(
            sequence_id=member.sequence_id,
            choice=member.choice,
            prompt_token_ids=member.prompt,
            output_token_ids=tuple(member.output) if member.sampling.reads_output else (),
            token_ids=known[member.computed : end],
            start=member.computed,
            block_ids=tuple(member.blocks),
            wants_sample=at_end and not member.pooling,
            pooling=member.pooling if at_end or member.pooling == "mean" else "",
            wants_prompt_logprobs=(
                member.sampling.num_prompt_logprobs is not None and member.computed < len(member.prompt)
            ),
            forks=member.forks if at_end else (),
            sampling=member.sampling,
            stop=StopParams(max_new_tokens=member.max_new_tokens, stop_token_ids=(2,)),
        )

    def _apply(self, member: Member, item: ScheduledSequence, result: StepResult) -> None:
        member.copies = []
        if item.sequence_id in result.errors:
            self._fail(member)
            return
        member.computed = item.end
        if member.pooling and item.end == len(member.prompt):
            self._end(member)
        if not item.wants_sample:
            return
        (sampled,) = result.samples[item.sequence_id]
        children = [self._child(member, fork, result) for fork in item.forks] if sampled.error is None else []
        member.forks = ()
        self.members += [child for child in children if child is not None]
        if sampled.error is not None:
            self._fail(member)
            return
        if len(member.output) + 1 >= member.max_new_tokens:
            self._end(member)
            return
        member.output.append(sampled.token_id)

    def _child(self, member: Member, fork: Fork, result: StepResult) -> Member | None:
        """A further choice: it shares nothing here, so all of its blocks are copies."""
        (sampled,) = result.samples[fork.sequence_id]
        if sampled.error is not None or member.max_new_tokens <= 1:
            return None
        blocks = [self._free.pop() for _ in member.blocks]
        return replace(
            member,
            sequence_id=fork.sequence_id,
            choice=fork.choice,
            forks=(),
            output=[*member.output, sampled.token_id],
            blocks=blocks,
            copies=list(zip(member.blocks, blocks, strict=True)),
        )

    def _fail(self, member: Member) -> None:
        """An engine that runs ahead learns of it when the next step is under way."""
        self.members.remove(member)
        self._leaving += member.blocks

    def _end(self, member: Member) -> None:
        self.members.remove(member)
        self._give_back(member)

    def _give_back(self, member: Member) -> None:
        self._free += member.blocks
        member.blocks = []


def ahead(steps: Sequence[Told]) -> list[tuple[Batch, set[int]]]:
    """The batches of a story as an engine that runs one step ahead makes them, each with the ids of its surplus items.

    What the step before samples is PENDING, but for who needs its output. Who got no token from the step before has an
    item all the same: the engine did not know.
    """
    batches: list[tuple[Batch, set[int]]] = []
    for number, told in enumerate(steps):
        before = steps[number - 1] if number else None
        items = [_pending(item, before) for item in told.batch.items]
        surplus = [] if before is None else _surplus(before, {item.sequence_id for item in items})
        whole = (*items, *surplus)
        batch = replace(told.batch, items=whole, num_tokens=sum(item.num_tokens for item in whole))
        batches.append((batch, {item.sequence_id for item in surplus}))
    return batches


def _pending(item: ScheduledSequence, before: Told | None) -> ScheduledSequence:
    if before is None or item.sequence_id not in before.result.samples or item.sampling.reads_output:
        return item
    return replace(item, token_ids=(PENDING,)) if item.num_tokens == 1 else item


def _surplus(before: Told, present: set[int]) -> list[ScheduledSequence]:
    failed = []
    for item in before.batch.items:
        sample = before.result.samples.get(item.sequence_id)
        error = item.sequence_id in before.result.errors or (sample is not None and sample[0].error is not None)
        room = item.end < len(item.block_ids) * 16
        if error and item.wants_sample and item.sequence_id not in present and room:
            failed.append(replace(item, token_ids=(PENDING,), start=item.end, forks=(), wants_prompt_logprobs=False))
    return failed
