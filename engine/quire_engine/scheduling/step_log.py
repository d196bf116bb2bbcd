"""The last steps with the reason of every decision, and the lives of the requests in them.

Owns the ring of steps, the events between them and the lives of live and of recently finished requests. Promises: to
note costs a step little, whoever reads pays for the rest; it decides nothing, so plans do not depend on it.
Must not know: policies, clocks, how steps are computed; the tokens' values it does not keep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Values

from quire_engine.batch import PENDING, Batch
from quire_engine.scheduling.request_life import RequestLife
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_entries import Event, Step
from quire_engine.scheduling.step_plan import Decision, StepPlan
from quire_engine.scheduling.step_records import EventKind
from quire_engine.types import FinishReason, TokenOutput

MOST_FINISHED = 1024  # lives kept of requests that have ended


class StepLog:
    """Noted by the scheduler with every call that changes it; read between steps."""

    def __init__(self, num_steps: int, roster: Roster) -> None:
        self.steps: deque[Step] = deque(maxlen=num_steps)
        self.events: deque[Event] = deque(maxlen=4 * num_steps)
        self.live: dict[str, RequestLife] = {}
        # Results that were taken in, for `settle`, since tokens do not wait for the log: step, outputs, how many
        # sequences were unfinished then, seconds, time.
        self.results: list[tuple[int, Values[TokenOutput], int, float, float]] = []
        self.now = 0.0  # of the latest call that knew it
        self._roster = roster
        self._finished: dict[str, RequestLife] = {}  # the longest ended first
        self._ordinal = 0
        self._last_step = 0  # planned
        self._open: dict[int, Step] = {}  # planned and not applied
        self._life_of: dict[int, RequestLife] = {}  # by sequence, of live requests
        self._names: dict[int, tuple[str, int]] = {}  # request and choice by sequence, as long as a step names it
        self._leaving: deque[tuple[int, list[int]]] = deque()  # (last step, sequences) of requests that have ended
        self._unplaced: list[RequestLife] = []  # added or preempted since the last plan: why they wait is not known yet
        self._num_computing_prompts = 0
        self._num_unfinished = 0  # choices
        self._num_reading_output = 0  # requests, whose steps may bring several tokens

    def life(self, request_id: str) -> RequestLife | None:
        """Of a live request, or of one that ended not long ago."""
        return self.live.get(request_id) or self._finished.get(request_id)

    def finished(self) -> Iterator[RequestLife]:
        """Those that are still known, the last first."""
        return reversed(self._finished.values())

    def name(self, sequence_id: int) -> tuple[str, int]:
        """(request_id, choice) of a sequence in one of the steps."""
        return self._names[sequence_id]

    def added(self, group: Group, now: float) -> None:
        """A request was accepted."""
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
        )
        for sequence in group.sequences:
            self._know(sequence, life)
        life.wait("", self._last_step + 1, now)
        self._finished.pop(request.request_id, None)
        self.live[request.request_id] = life
        self._num_reading_output += group.reads_output
        self._unplaced.append(life)
        self._note_event("submit", request.request_id, asked=_asked(group), hashes=group.leader.block_hashes)

    def forked(self, sequence: Sequence) -> None:
        """A live request has one sequence more than it was added with."""
        self._know(sequence, self.live[sequence.group.request.request_id])

    def planned(self, step_id: int, plan: StepPlan, batch: Batch | None, blocks_used: int, now: float) -> None:
        """A plan was made, `settle` was called before; with no batch nothing is computed."""
        self.now, self._last_step = now, step_id
        step = Step(step_id, self._next_ordinal(), batch, plan.decisions, now)
        roster = self._roster
        step.running, step.waiting, step.blocks_used = roster.num_running, len(roster.waiting), blocks_used
        for decision in plan.decisions:
            self._note_decision(decision, step_id, now)
        if self._unplaced:
            self._place(step, now)
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
        """Note the results that have come, before anything else changes: their tokens are on their way by now."""
        ended: dict[str, int] = {}  # by request: the step in which its last choice did
        for result in self.results:
            ended |= self._applied(*result)
        self.results.clear()
        for request_id, step_id in ended.items():  # not before: choices of a request may end in two of the results
            life = self.live[request_id]
            if life.group is not None and life.group.state == "finished":
                self._finish(life, step_id)

    def _applied(
        self, step_id: int, outputs: Values[TokenOutput], num_unfinished: int, seconds: float, now: float
    ) -> dict[str, int]:
        """A step's result; the requests of which choices ended in it."""
        self.now = now
        step = self._open.pop(step_id)
        step.applied_at, step.seconds, step.applied_ordinal = now, seconds, self._next_ordinal()
        for life, run in step.turning:
            group = life.group
            if group is not None and group.num_preemptions == run and group.first_token is not None:
                self._num_computing_prompts -= life.is_computing_prompt
                life.go_on(step_id, now)
        if step.turning:
            step.turning = []
        # In most steps nobody ends and everyone gets one token: then there is nothing to look for.
        if self._num_unfinished != num_unfinished or self._num_reading_output:
            self._note_outputs(step, outputs)
        return {request_id: step_id for request_id, *_ in step.ends}

    def starved(self, group: Group, step_id: int) -> None:
        """The device had no memory for it: it was preempted behind the plan's back."""
        self.settle()
        self._open[step_id].starved.append(group.request.request_id)
        self._preempted(self.live[group.request.request_id], "device", step_id + 1, self.now)

    def ends(self, request_id: str, finish: FinishReason) -> None:
        """A live request is about to end, and no step has made it."""
        self.settle()
        self._note_event("abort" if finish == "abort" else "fail", request_id)
        life = self.live[request_id]
        for choice in list(life.sequences):
            self._end(life, choice, finish)
        self._finish(life, self._last_step)

    def _note_decision(self, decision: Decision, step_id: int, now: float) -> None:
        life = self.live[decision.request_id]
        if decision.kind == "enters":
            life.enter(decision.num_tokens, step_id, now)
            self._num_computing_prompts += 1
        elif decision.kind == "waits":
            life.wait(decision.reason, step_id, now)
        elif decision.kind == "preempted":
            self._preempted(life, decision.reason, step_id, now)
        elif decision.kind == "elder" and life.elder_step is None:
            life.elder_step = step_id

    def _know(self, sequence: Sequence, life: RequestLife) -> None:
        life.sequence_ids.append(sequence.sequence_id)
        life.sequences[sequence.choice] = sequence
        self._life_of[sequence.sequence_id] = life
        self._names[sequence.sequence_id] = life.request_id, sequence.choice
        self._num_unfinished += 1

    def _note_outputs(self, step: Step, outputs: Values[TokenOutput]) -> None:
        for output in outputs:
            if output.finish is not None:
                said = self._end(self.live[output.request_id], output.choice, output.finish)
                step.ends.append((output.request_id, output.choice, output.finish, said))
            if len(output.token_ids) > 1:
                step.forced.append((output.request_id, output.choice, len(output.token_ids)))

    def _preempted(self, life: RequestLife, cause: str, step_id: int, now: float) -> None:
        self._num_computing_prompts -= life.is_computing_prompt
        life.preempt(cause, step_id, now)
        self._unplaced.append(life)

    def _place(self, step: Step, now: float) -> None:
        """Only changes of a reason are decisions: those who are new in the queue may have theirs from before."""
        for life in self._unplaced:
            group = life.group
            if group is None or group.state == "running":
                continue
            if not life.reason:
                name, reason = life.request_id, group.wait_reason
                step.decisions = [*step.decisions, Decision(kind="waits", request_id=name, reason=reason)]
            life.wait(group.wait_reason, step.step_id, now)
        self._unplaced.clear()

    def _note_chunks(self, step: Step, batch: Batch) -> None:
        for item in batch.items:
            life = self._life_of[item.sequence_id]
            # What a step in flight is about to sample is computed: that is a decode planned ahead.
            if life.is_computing_prompt and item.token_ids[-1] != PENDING:
                life.note_chunk(step.step_id, item.start, item.num_tokens)
                if item.wants_sample or (life.max_new_tokens == 0 and item.end == item.num_prompt_tokens):
                    step.turning.append((life, item.run))

    def _end(self, life: RequestLife, choice: int, finish: FinishReason) -> int:
        """A choice ends; how many tokens it has said."""
        self._num_unfinished -= 1
        sequence = life.sequences.get(choice)
        if sequence is not None:
            first = sequence.num_prompt_tokens // sequence.table.block_size
            if len(sequence.block_hashes) > first:
                self._note_event("end", life.request_id, choice=choice, hashes=sequence.block_hashes[first:])
        return life.end(choice, finish)

    def _finish(self, life: RequestLife, step_id: int) -> None:
        """The request goes to those that have ended."""
        self._num_computing_prompts -= life.is_computing_prompt
        self._num_reading_output -= life.group is not None and life.group.reads_output
        life.finish(step_id, self.now)
        del self.live[life.request_id]
        for sequence_id in life.sequence_ids:
            del self._life_of[sequence_id]
        self._leaving.append((step_id, life.sequence_ids))
        self._finished[life.request_id] = life
        if len(self._finished) > MOST_FINISHED:
            del self._finished[next(iter(self._finished))]

    def _note_event(
        self,
        kind: EventKind,
        request_id: str,
        *,
        choice: int = 0,
        asked: dict[str, object] | None = None,
        hashes: Values[bytes] = (),
    ) -> None:
        event = Event(
            kind,
            request_id,
            ordinal=self._next_ordinal(),
            after_step=self._last_step,
            at=self.now,
            choice=choice,
            asked=asked,
            hashes=hashes,
        )
        self.events.append(event)

    def _next_ordinal(self) -> int:
        self._ordinal += 1
        return self._ordinal


def _asked(group: Group) -> dict[str, object]:
    """What plans follow from, of a request; how it samples, and its tokens, are its own affair."""
    request = group.request
    return {
        "num_prompt_tokens": group.num_prompt_tokens,
        "max_new_tokens": group.max_new_tokens,
        "n": request.n,
        "priority": request.priority,
        "arrival_time": request.arrival_time,
        "num_resumed_tokens": [len(token_ids) for token_ids in request.resumed_token_ids],
        "finished_choices": list(request.finished_choices),
        "reads_cache": group.reads_cache,
        "reads_output": group.reads_output,
        "pooling": request.pooling,
    }
