"""Which sequences compute how many tokens in each step, and what becomes of the tokens that come back.

Every accepted request has one terminal output per choice, within its printed bound; same calls, same plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from quire_engine.batch import Batch, SampledToken, ScheduledSequence, StepResult
from quire_engine.errors import InfeasibleRequest
from quire_engine.invariants import require
from quire_engine.limits import SchedulerConfig
from quire_engine.scheduling.beam_forks import BeamForks
from quire_engine.scheduling.gate import check_request
from quire_engine.scheduling.log.inspection import Arguments, Inspection, engine_stats
from quire_engine.scheduling.log.step_log import StepLog
from quire_engine.scheduling.outputs import (
    error_output,
    error_outputs,
    expired_outputs,
    prompt_only_output,
    token_output,
)
from quire_engine.scheduling.planner import Planner
from quire_engine.scheduling.policies import Policies, policies_for
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.swapping import allocator_for
from quire_engine.types import NON_FINITE, EngineStats, FinishReason, GenerationRequest, TokenOutput

MAX_STARVED = 3  # times that a request is preempted for want of the device's memory, and tried again


class Scheduler:
    """Iteration-level scheduling of requests over one pool of KV blocks.

    How a step is planned is told at the head of `planner`; what holds at all times in `check_invariants`. A request's n
    choices enter, wait and are preempted together. Raises ConfigError for limits that contradict each other.
    """

    def __init__(
        self, config: SchedulerConfig, *, policies: Policies | None = None, host_keys: Collection[bytes] = ()
    ) -> None:
        """`host_keys`: the hashes of what the first host blocks hold, from an earlier run."""
        config.check()
        limits = config.limits
        policies = policies or policies_for(limits)
        self._config = config
        self._itl = policies.itl
        self._kv, self._swapping = allocator_for(config, host_keys)
        self._roster = Roster(self._kv, policies.order)
        self._planner = Planner(limits, policies, self._kv, self._roster, self._swapping)
        self._log = StepLog(limits, self._roster) if limits.step_log else None
        self._beam_forks = BeamForks(self._kv, self._roster, self._log)
        self._inspection = Inspection(
            config, self._kv, self._roster, self._log, len(host_keys), check=self.check_invariants
        )
        self._step, self._applied_at = 0, 0.0
        self._prefill_tokens = self._decode_tokens = 0  # of the last applied step
        self._scheduled_at: dict[int, float] = {}  # by step, of those not applied
        self._deadlines = Deadlines()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished and not held."""
        return len(self._roster.live) > len(self._roster.held)

    @property
    def needs_results(self) -> bool:
        """Whether the next plan has to know the tokens in flight: penalties, grammars and thinking follow from them."""
        return any(group.reads_output for group in self._roster.running)

    def add(self, request: GenerationRequest, now: float) -> None:
        """Accept a request: it will finish. Raises InfeasibleRequest if no schedule could serve it."""
        if request.request_id in self._roster.live:
            raise InfeasibleRequest("a request with this id is unfinished")
        check_request(self._config, request)
        prompt, most = request.prompt_token_ids, request.stop.max_new_tokens
        work = self._config.work(num_prompt=len(prompt), max_new_tokens=most, n=request.num_sequences)
        bound = self._config.limits.wait_bound(work, sum(group.work for group in self._roster.live.values()))
        account = self._planner.accounts.open(request, self._roster.waiting)
        self._roster.join(request, step=self._step, work=work, wait_bound=bound, account=account)
        self._deadlines.add(request, self._roster.live)
        if self._log is not None:
            self._log.added(self._roster.live[request.request_id], now)

    def expire(self, now: float) -> list[TokenOutput]:
        """End the requests whose deadline has passed; their blocks are free at once."""
        outputs: list[TokenOutput] = []
        for request_id in self._deadlines.due(now):
            group = self._roster.live.get(request_id)
            if group is not None:
                if self._log is not None:
                    self._log.ends(request_id, "expire", now)
                outputs += expired_outputs(group, self._roster.end_all(group))
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request without an output; its blocks are free at once. False if it was not live."""
        group = self._roster.live.get(request_id)
        if group is None:
            return False
        if self._log is not None:
            self._log.ends(request_id, "abort")
        self._roster.end_all(group)
        return True

    def fail(self, request_id: str, message: str) -> list[TokenOutput]:
        """End a request with an error output for each unfinished choice; empty if it was not live."""
        group = self._roster.live.get(request_id)
        if group is None:
            return []
        if self._log is not None:
            self._log.ends(request_id, "fail")
        return self._fail_all(group, message)

    def hold(self, request_id: str) -> bool:
        """Set a request aside, whether it runs or waits: no seat, no blocks, no claim until its release.

        False if it is not live, or is held already. Called between two steps, whatever is in flight. After its release
        it goes on with the very tokens that it would have had; those who go on meanwhile wait no longer for it.

        A held group is a preempted one that does not wait. What it had computed stays matchable in the pool as prefixes
        do that nobody holds: it is found again by its release, unless others needed the blocks, who take them before
        anyone that runs is preempted. So holding costs nothing, and a release the rest of a block, or at worst a
        preemption's recomputation.
        """
        group = self._roster.live.get(request_id)
        if group is None or group.state == "held":
            return False
        if self._log is not None:
            self._log.held(request_id)
        self._planner.let_go(group)
        self._roster.hold(group)
        return True

    def release(self, request_id: str) -> bool:
        """Let a held request wait for its seat again, with its wait bounded anew. False if it is not held.

        Why the bound on waiting holds (`policies.ElderRule`): a held group is never the elder, and stops being it.
        Released, it is to the elder rule as a request that has just come: the last of the live ones, its age 0, its
        bound counted from now. So none that was live then ever waits for it as one that came before. In the queue it
        has its old place, on which no bound rests.
        """
        group = self._roster.held.get(request_id)
        if group is None:
            return False
        live = self._roster.live.values()
        others = sum(other.work for other in live if other.state != "held")
        self._planner.accounts.open(group.request, self._roster.waiting)  # the time in which it was held is no credit
        bound = self._config.limits.wait_bound(group.work, others)
        self._roster.release(group, step=self._planner.step, wait_bound=bound)
        if self._log is not None:
            self._log.released(group)
        return True

    def reset_prefix_cache(self) -> Dropped:
        """Forget on an operator's order what the prefix cache knows: in the pool, on the host and so on disk.

        Who runs or is swapped out keeps what it has and its tokens; from then on nobody else finds it, and the log says
        when, so that a replay does too.
        """
        if self._log is not None:
            self._log.reset()
        num_blocks, host_blocks = self._kv.forget_cached()
        return Dropped(num_blocks=num_blocks, host_blocks=host_blocks)

    def answer(self, question: str, arguments: Arguments) -> object:
        """A plain value that tells about this moment; questions are in `Inspection`. Raises Unanswerable."""
        return self._inspection.answer(question, arguments)

    def wait_bound(self, request_id: str) -> int:
        """Steps from submission, or release, within which the live request ends. Raises KeyError if it is not live."""
        return self._roster.live[request_id].wait_bound

    def schedule(self, now: float) -> Batch | None:
        """The next step's work, or None if there is none, or none that can be told before a result is applied.

        Its result is applied before the next call, or with `plans_ahead` before the one after that. The plan is taken
        to go well, and every sequence in it to go on; what turns out otherwise is passed over in the next one's result.
        """
        if not self.has_work:
            return None
        self._step += 1
        if self._log is not None:
            self._log.settle()
        plan = self._planner.plan(self._step, now)
        batch = plan.batch(self._step, self._kv.take_moves()) if plan.slices else None
        if self._log is not None:
            self._log.planned(self._step, plan, batch, self._kv.num_blocks - self._kv.num_available, now)
        if batch is None:
            return None
        self._scheduled_at[self._step] = now
        self._follow(batch)
        return batch

    def apply(self, batch: Batch, result: StepResult, now: float) -> list[TokenOutput]:  # noqa: PLR0912 - kinds of items
        """Take in a step's tokens, scores and errors.

        Sequences that ended or were preempted since `schedule` are passed over: what was computed for them is void.
        """
        outputs: list[TokenOutput] = []
        sequences, samples, errors = self._roster.sequences, result.samples, result.errors
        if result.non_finite:
            self._disown_non_finite(batch, result)
        for item in batch.items:
            sequence = sequences.get(item.sequence_id)
            if sequence is None or item.run != sequence.group.num_preemptions:
                continue
            if item.sequence_id in errors:
                outputs += self._fail_slice(sequence, item, errors[item.sequence_id])
                continue
            if item.sequence_id in result.starved:
                outputs += self._try_later(sequence.group, batch.step_id)
                continue
            end = item.start + len(item.token_ids)
            self._kv.commit(sequence, end)
            if item.wants_prompt_logprobs:
                sequence.group.add_prompt_logprobs(result.prompt_logprobs[item.sequence_id])
            if item.pooling and sequence.group.pooled is not None:
                sequence.group.pooled.add(result.pooled[item.sequence_id])
            if sequence.group.beams is not None:
                outputs += self._beam_forks.take(sequence.group, item, samples, batch.step_id, now)
            elif item.wants_sample:
                outputs.append(self._take_tokens(sequence, samples[item.sequence_id], end, now))
                for fork in item.forks:
                    follower = sequences[fork.sequence_id]
                    outputs.append(self._take_tokens(follower, samples[fork.sequence_id], end, now))
            elif sequence.group.max_new_tokens == 0 and end == item.num_prompt_tokens:
                outputs += self._finish_prompt_only(sequence.group, now)
        self._decode_tokens = batch.num_decodes
        self._prefill_tokens = batch.num_tokens - batch.num_decodes
        # A step that was planned ahead began when the one before it ended.
        began = max(self._scheduled_at.pop(batch.step_id, now), self._applied_at)
        self._applied_at = now
        if self._log is not None:
            self._log.results.append((batch.step_id, outputs, len(sequences), result, (now - began, now)))
        self._itl.learn(prompt_tokens=self._prefill_tokens, num_decodes=batch.num_decodes, seconds=now - began)
        if self._swapping is not None:
            self._swapping.learn(prompt_tokens=self._prefill_tokens, num_decodes=batch.num_decodes, seconds=now - began)
        return outputs

    def stats(self) -> EngineStats:
        """Gauges of this moment and counters since the start; the caller adds the times."""
        books = engine_stats(self._kv, self._roster, self._planner)
        books = replace(books, prefill_tokens=self._prefill_tokens, decode_tokens=self._decode_tokens)
        return books if self._swapping is None else self._swapping.add_to(books)

    def check_invariants(self) -> None:
        """Raise InvariantViolation if queues, counts, tables and blocks disagree. Call between steps.

        What holds at all times, by the numbers that the tests cite; those with a star are looked at here, the
        missing ones belong to what this scheduler does not do:

        I1*  references: a block's count is the number of live tables that hold it, and of copies planned from it.
        I2*  partition: free, cached and used blocks are disjoint and make up the pool; so it is with the host's.
        I3   exclusive writes: no step writes to a block that is shared or can be matched.
        I4*  tables: a table has just the blocks for its reserved tokens, of which there are no more than known ones.
        I5*  limits: a step's tokens and slices, the running sequences and the unfinished prompts keep to them.
        I6   no stall: a running decode gets its token in every step, unless its group is preempted in it.
        I7   elder: it is never preempted for another, and what is left of its work falls with every step.
        I8   no idling: no step is empty while a request is unfinished and not held.
        I9   gate: a request that cannot be served is refused by `add`, never later.
        I10  determinism: same calls, same plans and same outputs.
        I11  shares: under fair queueing, tenants that always wait differ by no more than `FairQueue` promises.
        I12  solo tokens: a choice's tokens are those it gets alone, however it is batched, cut, shared or preempted.
        I14* swap: what a swapped sequence kept is in the pool or on the host, and comes back as it was.
        I15  no leak: no block is used when no request is left.
        I16  gauges: `stats` equals the state, counted anew.
        I17* wait bound: a request ends within the steps that `wait_bound` named at its submission, or its last release.
        I18  replay: a step log's inputs, given to another scheduler, bring the same plans.
        I19* held: who is set aside has no seat, no block and no part in plans, and is never the elder.
        I20* bypasses: no group is overtaken more than `max_bypasses` times, but while it waits for a prefix.
        """
        limits, roster = self._config.limits, self._roster
        roster.check()
        require(roster.num_running <= limits.max_num_seqs, f"{roster.num_running} sequences run")
        others = [group for group in roster.running if group is not self._planner.elder]
        for side, partial in Counter(group.side for group in others if group.is_prefilling).items():
            require(partial <= limits.max_num_partial_prefills, f"{partial} requests of {side} compute their prompts")
        require(self._planner.elder not in roster.held.values(), "the elder is held")
        for group in roster.contenders():
            age = self._step - group.added_step
            require(age < group.wait_bound, f"request {group.request.request_id} is alive after {age} steps")
            require(group.num_bypasses <= limits.max_bypasses, f"{group.num_bypasses} bypasses of one request")

    def _follow(self, batch: Batch) -> None:
        """Take a plan for computed: its sequences go on, a finished prompt goes to those who wait for it."""
        sequences = self._roster.sequences
        for item in batch.items:
            sequence = sequences.get(item.sequence_id)
            if sequence is None or item.run != sequence.group.num_preemptions:
                continue
            group, end = sequence.group, item.end
            self._kv.advance(sequence, end)
            if not group.prompt_shared and end == item.num_prompt_tokens:
                for follower in group.followers():
                    self._kv.fork(sequence, follower, end)
                group.share_prompt()
            if item.wants_sample:
                group.launch(sequence, samples=True)
                for fork in item.forks:
                    group.launch(sequences[fork.sequence_id], samples=True)
            elif group.max_new_tokens == 0 and end == item.num_prompt_tokens:
                for each in group.sequences:
                    group.launch(each, samples=False)

    def _take_tokens(self, sequence: Sequence, samples: tuple[SampledToken, ...], at: int, now: float) -> TokenOutput:
        """Put the sampled tokens in their places from position `at` on, up to the one that ends the sequence.

        Those behind that one were never wanted; of several, the others were not awaited and nothing is in flight.
        """
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
                self._roster.end(sequence)
                break
        token_ids[at : at + 1] = taken
        if group.account is not None:
            group.account.charge_output(len(taken))
        if sequence.num_forced != len(taken) - 1:
            sequence.note_forced(len(taken) - 1)
        return token_output(sequence, samples, tuple(taken), finish)

    def _finish_prompt_only(self, group: Group, now: float) -> list[TokenOutput]:
        group.note_first_token(now)
        return [prompt_only_output(sequence) for sequence in self._roster.end_all(group)]

    def _fail_slice(self, sequence: Sequence, item: ScheduledSequence, message: str) -> list[TokenOutput]:
        """A slice of the prompt that failed failed for every choice that waits for it, a beam's for the search."""
        if item.start < item.num_prompt_tokens or sequence.group.beams is not None:
            return self._fail_all(sequence.group, message)
        self._roster.end(sequence)
        return [error_output(sequence, message)]

    def _disown_non_finite(self, batch: Batch, result: StepResult) -> None:
        """Put those of `result.non_finite` among its starved ones, which are computed anew, or else among its errors.

        Those are sequences whose row held a value that is no number; nobody is given what the blocks hold that they
        read and wrote. A prefix that another request left in the cache may be what is wrong: computed anew, once, it is
        not found any more, and a request for which that brings the same ends. Blocks need not be cleared: attention
        never has what lies behind a sequence's end for an operand, and what lies before it is written before it is
        read.
        """
        for item in batch.items:
            sequence = self._roster.sequences.get(item.sequence_id)
            if sequence is None or item.run != sequence.group.num_preemptions:
                continue
            concerned = [item.sequence_id, *(fork.sequence_id for fork in item.forks)]
            if result.non_finite.isdisjoint(concerned):
                continue
            group = sequence.group
            self._kv.disown(group.sequences)
            for sequence_id in concerned:  # neither token nor error: what is put down below is all that is said of them
                result.samples.pop(sequence_id, None)
                result.errors.pop(sequence_id, None)
            if group.num_starved:
                result.errors[item.sequence_id] = NON_FINITE
            else:
                result.starved.add(item.sequence_id)

    def _try_later(self, group: Group, step: int) -> list[TokenOutput]:
        """Preempt a group that the device has no memory to compute; that it had none again and again is an error."""
        group.note_starved()
        if group.num_starved > MAX_STARVED:
            return self._fail_all(group, "the device has no memory left to compute this request")
        self._roster.preempt(group)
        if self._log is not None:
            self._log.starved(group, step)
        return []

    def _fail_all(self, group: Group, message: str) -> list[TokenOutput]:
        return error_outputs(group, self._roster.end_all(group), message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What the prefix cache knew and knows no more."""

    num_blocks: int  # of the pool, which nobody held
    host_blocks: tuple[int, ...]  # of the host's memory; what is on disk of them is to go too


_FEW = 64  # entries of requests that have ended: not worth a look


class Deadlines:
    """The deadlines of live requests, the earliest first: each is told once, none early.

    What a request that ended has left here is bounded by those that live.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request: GenerationRequest, live: Collection[str]) -> None:
        """Watch a request, where it has a deadline. `live` are the ids of all that are unfinished."""
        if request.deadline is None:
            return
        if len(self._heap) > 2 * len(live) + _FEW:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)
        heappush(self._heap, (request.deadline, request.request_id))

    def due(self, now: float) -> list[str]:
        """The ids of those whose time is over; of requests that have ended, too."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heappop(self._heap)[1])
        return due
