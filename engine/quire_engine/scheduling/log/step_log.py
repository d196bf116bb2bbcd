"""The log of the last steps, the reason of every decision, and the lives of their requests.

Recording costs a step little; readers pay for the rest. The scheduler never reads the log, so plans do not depend on
it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Values
from typing import Literal

import numpy as np

from quire_engine.contract.batch import PENDING, Batch, SampledToken, ScheduledSequence, StepResult, num_accepted
from quire_engine.contract.decodes import BatchInColumns
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import FinishReason, GenerationRequest, HoldReason, TokenOutput
from quire_engine.scheduling.log.request_life import Nearest, PreemptionMode, RequestLife
from quire_engine.scheduling.log.step_records import NOTHING, Contents, EventKind, FailedPart
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_plan import Decision, StepPlan

MOST_FINISHED = 1024  # ended requests whose lives are kept
_NO_ITEMS: tuple[ScheduledSequence, ...] = ()
_NO_SAMPLES = (SampledToken(),)


class StepLog:
    """A ring buffer of steps, the events between them, and the lives of live and recently ended requests.

    The scheduler calls it whenever its state changes. It is read between steps.
    """

    def __init__(self, limits: SchedulerLimits, roster: Roster) -> None:
        self.steps: deque[Step] = deque(maxlen=limits.step_log)
        self.events: deque[Event] = deque(maxlen=4 * limits.step_log)
        self.live: dict[str, RequestLife] = {}
        # Applied results that `settle` has not recorded yet, because outputs are sent first: step, outputs, number of
        # unfinished sequences, result, (seconds, time).
        self.results: list[tuple[int, Values[TokenOutput], int, StepResult, tuple[float, float]]] = []
        self.block_size = limits.block_size
        self.now = 0.0  # the latest time that a call gave
        self._roster = roster
        self._contents = Contents.for_log(limits.step_log if limits.enable_prefix_caching else 0)
        self._finished: dict[str, RequestLife] = {}  # by request, the earliest ended first
        self._ordinal = 0
        self._last_step = 0  # planned
        self._open: dict[int, Step] = {}  # steps that are planned and not applied, by id
        self._life_of: dict[int, RequestLife] = {}  # lives of live requests, by sequence
        self._names: dict[int, tuple[str, int]] = {}  # (request, choice) by sequence, while a step names it
        self._leaving: deque[tuple[int, list[int]]] = deque()  # (last step, sequences) of ended requests
        self._newly_waiting: list[RequestLife] = []  # since the last plan: no reason known yet
        self._num_computing_prompts = 0
        self._num_unfinished = 0  # choices
        self._num_reading_output = 0  # requests that may get several tokens in a step

    def life(self, request_id: str) -> RequestLife | None:
        """The life of a live or recently ended request."""
        return self.live.get(request_id) or self._finished.get(request_id)

    def finished(self) -> Iterator[RequestLife]:
        """The lives of ended requests that are still kept, the last one first."""
        return reversed(self._finished.values())

    def name(self, sequence_id: int) -> tuple[str, int]:
        """(request_id, choice) of a sequence in one of the steps."""
        return self._names[sequence_id]

    def request_of(self, ordinal: int) -> str | None:
        """The request of an event with this ordinal, if the log has it yet."""
        return next((event.request_id for event in reversed(self.events) if event.ordinal == ordinal), None)

    def contexts(self, step_id: int) -> dict[str, int]:
        """The tokens that each request of a step attends to, over all its choices; empty if the step is forgotten."""
        index = step_id - self.steps[0].step_id if self.steps else -1
        found: dict[str, int] = {}
        if 0 <= index < len(self.steps):
            step = self.steps[index]
            for sequence_id, start, size in zip(step.ids, step.starts, step.sizes or (1,) * len(step.ids), strict=True):
                request_id = self._names[sequence_id][0]
                found[request_id] = found.get(request_id, 0) + start + size
        return found

    def added(self, group: Group, now: float, *, waited: tuple[str, float] = ("", 0.0)) -> None:
        """A request was accepted. `waited`: for blocks of its prompt before that, from where, and the seconds."""
        self.settle()
        self.now = now
        request = group.request
        arrived = request.arrival_time if 0.0 < request.arrival_time <= now else now
        life = RequestLife(
            request_id=request.request_id,
            arrived_at=arrived,
            added_step=self._last_step,
            num_prompt_tokens=group.num_prompt_tokens,
            max_new_tokens=group.max_new_tokens,
            num_choices=request.n,
            num_resumed_tokens=sum(map(len, request.resumed_token_ids)),
            wait_bound=group.wait_bound,
            group=group,
            reads_cache=group.reads_cache,
        )
        for sequence in group.sequences:
            self._register(sequence, life)
        if waited[1]:
            life.note_transit(*waited, now)
        life.wait("", self._last_step + 1, now)
        self._finished.pop(request.request_id, None)
        self.live[request.request_id] = life
        self._num_reading_output += group.reads_output
        self._newly_waiting.append(life)
        event = self._note_event("submit", request.request_id, asked=scheduling_inputs(group))
        event.num_tokens, life.prompt_ordinal = life.num_prompt_tokens, event.ordinal
        event.asked["cache_salt"] = self._contents.salt_name(request.cache_salt)
        if self._contents.compares:
            event.shared = self._contents.add(event.ordinal, request.cache_salt, request.prompt_token_ids)
            event.complete_from = self._contents.complete_from
            ordinal, common = event.shared
            life.nearest = Nearest(
                ordinal=ordinal,
                num_tokens=common,
                token=self._contents.token_at(event.ordinal, common),
                other_token=self._contents.token_at(ordinal, common),
            )

    def pruned(self, sequence: Sequence) -> None:
        """A beam is pruned: its sequence is about to get another beam."""
        self._note_content(self.live[sequence.group.request.request_id], sequence)

    def searched(self, group: Group, step_id: int, parents: tuple[int, ...]) -> None:
        """Record that every beam of a group has its next token; `parents`: the parent beam of each sequence."""
        self._open[step_id].beams.append((group.request.request_id, parents))

    def planned(self, step_id: int, plan: StepPlan, batch: Batch | None, blocks_used: int, now: float) -> None:
        """Record a plan, after a call of `settle`; without a batch nothing is computed."""
        self.now, self._last_step = now, step_id
        step = Step(step_id, self._next_ordinal(), batch, plan.decisions, now)
        roster = self._roster
        step.guesses = tuple([(each.sequence_id, len(guesses), 0) for each, guesses in plan.drafts.items()])
        step.running, step.waiting, step.blocks_used = roster.num_running, len(roster.waiting), blocks_used
        for decision in plan.decisions:
            self._note_decision(decision, step_id, now)
        if self._newly_waiting:
            self._note_wait_reasons(step, now)
        if batch is not None:
            self._open[step_id] = step
            if self._num_computing_prompts:
                self._note_chunks(step, batch)
        self.steps.append(step)
        oldest = self.steps[0].step_id
        while self._leaving and self._leaving[0][0] < oldest:
            for sequence_id in self._leaving.popleft()[1]:
                self._names.pop(sequence_id, None)
        while self.events and self.events[0].after_step < oldest - 1:
            self.events.popleft()

    def settle(self) -> None:
        """Record the applied results, before anything else is recorded."""
        ended: dict[str, int] = {}  # by request: the step in which its last choice did
        for result in self.results:
            ended |= self._applied(*result)
        self.results.clear()
        for (
            request_id,
            step_id,
        ) in ended.items():  # after the loop, since a request's choices may end in several of the results
            life = self.live[request_id]
            if life.group is not None and life.group.state == "finished":
                self._finish(life, step_id)

    def _applied(
        self,
        step_id: int,
        outputs: Values[TokenOutput],
        num_unfinished: int,
        result: StepResult,
        times: tuple[float, float],
    ) -> dict[str, int]:
        """Record a step's result; returns its id for each request with a choice that ended in it."""
        step = self._open.pop(step_id)
        step.seconds, self.now = times
        step.rank_seconds = result.rank_seconds
        step.applied_at, step.applied_ordinal, now = self.now, self._next_ordinal(), self.now
        for life, run in step.prompts_done:
            group = life.group
            if group is not None and group.num_preemptions == run and group.first_token is not None:
                self._num_computing_prompts -= life.is_computing_prompt
                life.note_token(step_id, now)
        if step.prompts_done:
            step.prompts_done = []
        if result.errors or result.starved:
            self._note_failures(step, result)
        if step.guesses:
            self._note_guesses(step, result)
        # In most steps no choice ends and each gets one token: then there is nothing to record.
        if self._num_unfinished != num_unfinished or self._num_reading_output:
            self._note_outputs(step, outputs, result)
        return {request_id: step_id for request_id, *_ in step.ends}

    def starved(self, group: Group, step_id: int) -> None:
        """The device had no memory for a group, which was preempted after planning."""
        self.settle()
        self._open[step_id].starved.append(group.request.request_id)
        self._preempted(self.live[group.request.request_id], "device", step_id + 1, self.now)

    def ends(self, request_id: str, kind: Literal["abort", "fail", "expire"], now: float | None = None) -> None:
        """A live request is about to end, other than by a step."""
        self.settle()
        self.now = self.now if now is None else now
        self._note_event(kind, request_id)
        finish: FinishReason = "abort" if kind == "abort" else "error"
        life = self.live[request_id]
        for choice in list(life.sequences):
            self._end(life, choice, finish)
        self._finish(life, self._last_step)

    def reset(self) -> None:
        """The prefix cache was emptied."""
        self.settle()
        self._note_event("reset", "")

    def adopted(self, request: GenerationRequest, first: int, count: int, block_size: int) -> None:
        """Blocks of this prompt have come into the prefix cache from an earlier run, before the request is added."""
        self.settle()
        end = (first + count) * block_size
        salt = self._contents.salt_name(request.cache_salt)
        asked: dict[str, object] = {"cache_salt": salt, "weight": request.weight, "first": first, "count": count}
        event = self._note_event("adopt", request.request_id, asked=asked)
        event.num_tokens = end
        if self._contents.compares:
            event.shared = self._contents.add(event.ordinal, request.cache_salt, request.prompt_token_ids[:end])
            event.complete_from = self._contents.complete_from

    def held(self, request_id: str, reason: HoldReason) -> None:
        """A live request is about to be held, for this reason."""
        self.settle()
        self._note_event("hold", request_id)
        life = self.live[request_id]
        self._num_computing_prompts -= life.is_computing_prompt
        life.hold(reason, self._last_step, self.now)

    def released(self, group: Group) -> None:
        """A held request waits again."""
        self.settle()
        life = self.live[group.request.request_id]
        self._note_event("release", life.request_id)
        life.release(self._last_step, self.now, wait_bound=group.wait_bound)
        self._newly_waiting.append(life)

    def _note_decision(self, decision: Decision, step_id: int, now: float) -> None:
        life = self.live[decision.request_id]
        if decision.kind == "enters":
            life.enter(decision.num_tokens, step_id, now)
            self._num_computing_prompts += 1
        elif decision.kind == "waits":
            life.wait(decision.reason, step_id, now)
        elif decision.kind == "preempted":
            mode: PreemptionMode = "swap" if decision.num_tokens else "recompute"
            self._preempted(life, decision.reason, step_id, now, mode=mode, by=decision.by)
        elif decision.kind == "elder" and life.elder_step is None:
            life.elder_step = step_id

    def _register(self, sequence: Sequence, life: RequestLife) -> None:
        life.sequence_ids.append(sequence.sequence_id)
        life.sequences[sequence.choice] = sequence
        self._life_of[sequence.sequence_id] = life
        self._names[sequence.sequence_id] = life.request_id, sequence.choice
        self._num_unfinished += 1

    def _note_failures(self, step: Step, result: StepResult) -> None:
        """Record the slices that failed, also of sequences whose results were ignored: a replay ignores them too."""
        parts: tuple[tuple[Iterable[int], FailedPart], ...] = (
            (result.errors, "slice"),
            (result.starved, "memory"),
            (result.non_finite, "values"),
        )
        for sequence_ids, part in parts:
            step.failed += [(*self._names[sequence_id], part) for sequence_id in sequence_ids]

    def _note_guesses(self, step: Step, result: StepResult) -> None:
        """Record how many of a step's guessed tokens were accepted."""
        step.guesses = tuple(
            [(i, count, num_accepted(result.samples.get(i, _NO_SAMPLES))) for i, count, _ in step.guesses]
        )
        for sequence_id, count, accepted in step.guesses:
            life = self._life_of.get(sequence_id)
            if life is not None:  # else it was aborted meanwhile
                life.num_guessed += count
                life.num_guessed_right += accepted

    def _note_outputs(self, step: Step, outputs: Values[TokenOutput], result: StepResult) -> None:
        if any(output.finish == "error" for output in outputs):
            wrong = [sequence_id for sequence_id, samples in result.samples.items() if samples[-1].error is not None]
            step.failed += [(*self._names[sequence_id], "sample") for sequence_id in wrong]
        guessed = {
            self._names[i] for i, *_ in step.guesses if not any(each.is_forced for each in result.samples.get(i, ()))
        }
        for output in outputs:
            life = self.live[output.request_id]
            is_search = life.group is not None and life.group.beams is not None  # sends all its tokens at its end
            if output.finish is not None:
                num_output = self._end(life, output.choice, output.finish, len(output.token_ids) if is_search else None)
                step.ends.append((output.request_id, output.choice, output.finish, num_output))
            if len(output.token_ids) > 1 and not is_search and (output.request_id, output.choice) not in guessed:
                step.forced.append((output.request_id, output.choice, len(output.token_ids)))

    def _preempted(
        self,
        life: RequestLife,
        cause: str,
        step_id: int,
        now: float,
        *,
        mode: PreemptionMode = "recompute",
        by: str = "",
    ) -> None:
        self._num_computing_prompts -= life.is_computing_prompt
        life.preempt(cause, step_id, now, mode=mode, by=by)
        self._newly_waiting.append(life)

    def _note_wait_reasons(self, step: Step, now: float) -> None:
        """Record why new and preempted requests wait: plans record only changes of the reason."""
        for life in self._newly_waiting:
            group = life.group
            if group is None or group.state in ("running", "held"):
                continue
            if not life.reason:
                name, reason = life.request_id, group.wait_reason
                step.decisions = [*step.decisions, Decision(kind="waits", request_id=name, reason=reason)]
            life.wait(group.wait_reason, step.step_id, now)
        self._newly_waiting.clear()

    def _note_chunks(self, step: Step, batch: Batch) -> None:
        for item in batch.others:  # no row is a prompt's
            life = self._life_of[item.sequence_id]
            # A slice that ends with PENDING is a decode that was planned ahead.
            if life.is_computing_prompt and item.token_ids[-1] != PENDING:
                life.note_chunk(step.step_id, item.start, item.num_tokens)
                if item.wants_sample or (life.max_new_tokens == 0 and item.end == item.num_prompt_tokens):
                    step.prompts_done.append((life, item.run))

    def _end(self, life: RequestLife, choice: int, finish: FinishReason, num_output: int | None = None) -> int:
        """A choice ends; `num_output`: its output tokens, None for all that its sequence has."""
        self._num_unfinished -= 1
        sequence = life.sequences[choice]
        self._note_content(life, sequence)
        num_output = num_known_tokens(sequence) - life.num_prompt_tokens if num_output is None else num_output
        life.end(choice, finish, num_output)
        return num_output

    def _note_content(self, life: RequestLife, sequence: Sequence) -> None:
        """Record the tokens of a choice that ends, or of a beam that is pruned."""
        if not self._contents.compares:
            return
        num_known = num_known_tokens(sequence)
        event = self._note_event("end", life.request_id, choice=sequence.choice)
        event.num_tokens = num_known
        if num_known > life.num_prompt_tokens:
            salt = sequence.group.request.cache_salt
            known = sequence.token_ids[:num_known]
            event.shared = self._contents.extend(
                event.ordinal, life.prompt_ordinal, salt, known, life.num_prompt_tokens
            )
            event.complete_from = self._contents.complete_from

    def _finish(self, life: RequestLife, step_id: int) -> None:
        """Move the request's life to the ended ones."""
        self._num_computing_prompts -= life.is_computing_prompt
        self._num_reading_output -= life.group is not None and life.group.reads_output
        for sequence in life.sequences.values():  # a search has more beams than choices
            self._note_content(life, sequence)
        self._num_unfinished -= len(life.sequences)
        life.finish(step_id, self.now)
        del self.live[life.request_id]
        for sequence_id in life.sequence_ids:
            del self._life_of[sequence_id]
        self._leaving.append((self._last_step, life.sequence_ids))  # a step that was planned ahead may name them too
        self._finished[life.request_id] = life
        if len(self._finished) > MOST_FINISHED:
            del self._finished[next(iter(self._finished))]

    def _note_event(
        self, kind: EventKind, request_id: str, *, choice: int = 0, asked: dict[str, object] | None = None
    ) -> Event:
        ordinal = self._next_ordinal()
        event = Event(
            kind, request_id, ordinal=ordinal, after_step=self._last_step, at=self.now, choice=choice, asked=asked
        )
        self.events.append(event)
        return event

    def _next_ordinal(self) -> int:
        self._ordinal += 1
        return self._ordinal


class Step:
    """One step in a compact form, since the log has thousands of steps with hundreds of sequences each.

    n slices take 16 n bytes in most steps. No token is kept.
    """

    __slots__ = (
        *("step_id", "ordinal", "planned_at", "applied_at", "applied_ordinal", "seconds"),
        *("ids", "starts", "sizes", "num_tokens", "num_decodes", "num_prefills", "copies", "swaps", "decisions"),
        *(
            "running",
            "waiting",
            "blocks_used",
            "ends",
            "forced",
            "guesses",
            "starved",
            "failed",
            "beams",
            "prompts_done",
            "rank_seconds",
        ),
    )

    def __init__(self, step_id: int, ordinal: int, batch: Batch | None, decisions: list[Decision], now: float) -> None:
        ids, starts, sizes = _columns(batch)
        self.step_id = step_id
        self.ordinal = ordinal
        self.planned_at = now
        self.applied_at: float | None = None
        self.applied_ordinal: int | None = None
        self.seconds = 0.0
        self.ids, self.starts = ids, starts
        self.num_tokens = batch.num_tokens if batch is not None else 0
        self.num_decodes = batch.num_decodes if batch is not None else 0
        self.num_prefills = batch.num_prefills if batch is not None else 0
        # None: one token each, as in most steps.
        self.sizes = sizes if self.num_tokens != len(ids) else None
        self.copies = batch.copies if batch is not None else ()
        self.swaps = (len(batch.swap_out), len(batch.swap_in)) if batch is not None else (0, 0)
        self.decisions = decisions
        self.running = self.waiting = self.blocks_used = 0
        self.ends: list[tuple[str, int, FinishReason, int]] = []
        self.forced: list[tuple[str, int, int]] = []
        self.guesses: tuple[tuple[int, int, int], ...] = ()  # (sequence, guessed tokens, those accepted)
        self.starved: list[str] = []
        self.failed: list[tuple[str, int, FailedPart]] = []
        self.beams: list[tuple[str, tuple[int, ...]]] = []
        self.rank_seconds: tuple[float, ...] = ()
        self.prompts_done: list[tuple[RequestLife, int]] = []  # lives whose prompts this step completes, with their run


class Event:
    """A call from outside, or the content of a choice that ended."""

    __slots__ = (
        *("after_step", "asked", "at", "choice", "complete_from", "kind", "num_tokens", "ordinal"),
        *("request_id", "shared"),
    )

    def __init__(
        self,
        kind: EventKind,
        request_id: str,
        *,
        ordinal: int,
        after_step: int,
        at: float,
        choice: int = 0,
        asked: dict[str, object] | None = None,
    ) -> None:
        self.kind = kind
        self.request_id = request_id
        self.ordinal = ordinal
        self.after_step = after_step
        self.at = at
        self.choice = choice
        self.asked = asked or {}
        self.num_tokens = 0
        self.shared = NOTHING
        self.complete_from = 0


def _columns(batch: Batch | None) -> tuple[array[int], array[int], array[int]]:
    """The ids, starts and sizes of a batch's slices, in order."""
    if not isinstance(batch, BatchInColumns):
        items = batch.items if batch is not None else _NO_ITEMS
        sizes = array("q", [item.num_tokens for item in items])
        return array("q", [item.sequence_id for item in items]), array("q", [item.start for item in items]), sizes
    others, decodes = batch.others, batch.decodes
    return (
        batch.merged_column(decodes.sequence_ids, [item.sequence_id for item in others]),
        batch.merged_column(decodes.positions, [item.start for item in others]),
        batch.merged_column(np.ones_like(decodes.positions), [item.num_tokens for item in others]),
    )


def num_known_tokens(sequence: Sequence) -> int:
    """The sequence's tokens without those in flight."""
    token_ids = sequence.token_ids
    num_known = len(token_ids)
    while token_ids[num_known - 1] == PENDING:
        num_known -= 1
    return num_known


def scheduling_inputs(group: Group) -> dict[str, object]:
    """The fields of a request that plans depend on: neither its tokens nor how it samples."""
    request = group.request
    return {
        "num_prompt_tokens": group.num_prompt_tokens,
        "max_new_tokens": group.max_new_tokens,
        "may_stop": bool(group.stop_token_ids),
        "n": request.n,
        "priority": request.priority,
        "arrival_time": request.arrival_time,
        "num_resumed_tokens": [len(token_ids) for token_ids in request.resumed_token_ids],
        "finished_choices": list(request.finished_choices),
        "reads_cache": group.reads_cache,
        "reads_output": group.reads_output,
        "pooling": request.pooling,
        "tenant": request.tenant,
        "weight": request.weight,
        "max_running": request.max_running,
        "service_elsewhere": request.service_elsewhere,
        "service_class": request.service_class,
        "deadline": request.deadline,
        "cache_ttl": request.cache_ttl,
        "adapter": group.adapter,
        "num_beams": 0 if request.beam is None else request.beam.width,
    }
