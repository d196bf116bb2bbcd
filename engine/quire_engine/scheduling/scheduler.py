"""The scheduler: accepts requests, plans steps, and turns the results of steps into outputs.

Every accepted request has one terminal output per choice, within its wait bound. Equal calls give equal plans.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from quire_engine.contract.batch import Batch, StepResult
from quire_engine.contract.block_record import BlockRecord
from quire_engine.contract.block_store import BlockPeers, BlockStore
from quire_engine.contract.errors import InfeasibleRequest
from quire_engine.contract.invariants import require
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.token_columns import Outputs
from quire_engine.contract.types import EngineStats, GenerationRequest, HoldReason, TokenOutput
from quire_engine.scheduling.fast_forward import ChunkSeconds, DecodeSeconds, FastForward, Skipped, TokensLeft
from quire_engine.scheduling.gate import check_request
from quire_engine.scheduling.kept_prefixes import Allocate, KeptPrefixes, allocator_with
from quire_engine.scheduling.log.books import Books
from quire_engine.scheduling.log.fragmentation import Fragmentation
from quire_engine.scheduling.log.inspection import Arguments, Inspection
from quire_engine.scheduling.log.step_log import StepLog
from quire_engine.scheduling.outputs import expired_outputs
from quire_engine.scheduling.planner import Planner
from quire_engine.scheduling.policies import Policies, policies_for
from quire_engine.scheduling.recorded_pool import RecordedPool
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.running_decodes import FEWEST, RunningDecodes
from quire_engine.scheduling.speculation import Speculate
from quire_engine.scheduling.step_prices import AppliedStep
from quire_engine.scheduling.step_results import StepResults

_PREDICTED = 16  # of steps without prompts every so many are predicted, which takes longer than to learn from them


class Scheduler:
    """Iteration-level scheduling of requests over one pool of KV blocks.

    The header of `planner` tells how a step is planned; `check_invariants` lists what holds at all times. The n choices
    of a request enter, wait and are preempted together. Raises ConfigError for limits that contradict each other.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        policies: Policies | None = None,
        host_keys: Collection[bytes] = (),
        store: BlockStore | None = None,
        peers: BlockPeers | None = None,
        record: BlockRecord | None = None,
        speculate: Speculate | None = None,
        columns_from: int | None = FEWEST,
        allocate: Allocate | None = None,
    ) -> None:
        """`host_keys`: of the first host blocks, on disk; `store`, `peers`: of prefixes; `speculate` adds drafts.

        `record`: of what the pool holds, for an executor that computes one step at a time.

        `columns_from`: running requests from which on plain decodes have rows; None: never. `allocate`: makes the
        allocator in place of the one that the configuration asks for.
        """
        config.check()
        limits, policies = config.limits, policies or policies_for(config.limits)
        self._config, self._itl, self._prices = config, policies.itl, policies.prices
        self._kv, self._swapping = (
            allocator_with(config, host_keys, store, peers) if allocate is None else (allocate(config), None)
        )
        self._decodes = RunningDecodes(
            self._kv,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=config.max_model_len,
            fewest=columns_from if speculate is None else None,  # drafts are for each decode by itself
        )
        self._roster = Roster(self._kv, policies.order, self._decodes)
        self._planner = Planner(
            limits, policies, self._kv, self._roster, decodes=self._decodes, swapping=self._swapping
        )
        self._fast_forward = FastForward(
            limits, policies, self._kv, self._roster, decodes=self._decodes, planner=self._planner
        )
        self._log = StepLog(limits, self._roster) if limits.step_log else None
        self.kept = KeptPrefixes(self._kv, self._log, store, peers)
        self._speculation = None if speculate is None else speculate(self._kv)
        self._results = StepResults(
            self._kv,
            self._roster,
            decodes=self._decodes,
            planner=self._planner,
            log=self._log,
            speculation=self._speculation,
            swapping=self._swapping,
        )
        self._recorded = None if record is None else RecordedPool(self._kv, self._roster, record)
        self.num_taken_over = 0 if self._recorded is None else self._recorded.num_found  # blocks of the engine before
        num_restored = len(host_keys) + self.num_taken_over
        self._fragmentation = Fragmentation(self._kv, self._decodes)
        self._books = Books(self._kv, self._roster, self._decodes, self._planner, self._speculation)
        self._inspection = Inspection(
            config, self._kv, self._roster, self._log, num_restored, check=self.check_invariants
        )
        self._step, self._applied_at = 0, 0.0
        self._applied = AppliedStep()  # the last one
        self._scheduled_at: dict[int, float] = {}  # when each step in flight was planned
        self._deadlines = Deadlines()
        self.take_prefixes = self._kv.prefixes.take  # changes of cached prompt blocks, for a router
        self.take_cache_events = self._kv.told_blocks.take  # changes of all cached blocks, with tokens
        self.roster, self.limits = self._roster, limits  # for turns of adapters and simulations, to be read only

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished and not held."""
        return len(self._roster.live) > len(self._roster.held)

    @property
    def needs_results(self) -> bool:
        """Whether the next plan depends on the tokens in flight: with penalties, grammars, thinking limits, drafts."""
        if self._speculation is not None and self._speculation.needs_results:
            return True
        return any(group.reads_output for group in self._roster.running)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold now; cheaper than `stats`."""
        return self._kv.num_used

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no sequence holds and whose content can be matched; cheaper than `stats`."""
        return self._kv.num_cached

    @property
    def num_rows(self) -> int:
        """Running sequences whose decodes are kept as rows."""
        return len(self._decodes)

    def add(self, request: GenerationRequest, now: float) -> None:
        """Accept a request, which then finishes. Raises InfeasibleRequest if no schedule could serve it."""
        if request.request_id in self._roster.live:
            raise InfeasibleRequest("a request with this id is unfinished")
        check_request(self._config, request)
        prompt, most = request.prompt_token_ids, request.stop.max_new_tokens
        size = {"num_prompt": len(prompt), "max_new_tokens": most, "n": request.num_sequences}
        work = self._config.work(**size)
        bound = self._config.limits.wait_bound(work, sum(group.work for group in self._roster.live.values()))
        group = self._roster.join(
            request, step=self._step, work=work, wait_bound=bound, footprint=self._config.footprint(**size)
        )
        self._planner.accept(group)
        self._deadlines.add(request, self._roster.live)
        if self._log is not None:
            self._log.added(group, now, waited=self.kept.waited(request.request_id))

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
        for sequence in self._roster.end_all(group):
            if sequence.num_output_tokens:  # as most do that end by a stop string, which is not the engine's to see
                self._results.note_end(sequence)
        return True

    def fail(self, request_id: str, message: str) -> list[TokenOutput]:
        """End a request with an error output for each unfinished choice; empty if it was not live."""
        group = self._roster.live.get(request_id)
        if group is None:
            return []
        if self._log is not None:
            self._log.ends(request_id, "fail")
        return self._results.fail_all(group, message)

    def hold(self, request_id: str, reason: HoldReason = "client") -> bool:
        """Set a request aside until its release: it has no slot and no blocks, and no step computes it.

        False if it is not live, or is held already. May be called between any two steps, with steps in flight. After
        its release the request continues with the same tokens that it would have had. Other requests no longer wait for
        it. `reason`: its client does not read, or requests for other adapters have their turn.

        A held group is a preempted one that does not wait. Its computed blocks stay in the prefix cache and are usually
        found again at its release; other requests may take them before any running group is preempted. So holding costs
        nothing, and a release costs the rest of a block, or at worst a recomputation.
        """
        group = self._roster.live.get(request_id)
        if group is None or group.state == "held":
            return False
        if self._log is not None:
            self._log.held(request_id, reason)
        self._planner.drop_elder(group)
        self._roster.hold(group, reason)
        return True

    def release(self, request_id: str) -> bool:
        """Put a held request back into the queue, with a new wait bound. False if it is not held.

        Why the wait bound holds (`policies.ElderRule`): a held group is never the elder. When it is released, the elder
        rule treats it like a request that has just arrived: it is the last of the live ones, its age is 0, and its
        bound counts from now. So no group that was live then ever waits for it as for an earlier one. In the queue it
        has its old place, and no bound depends on that.
        """
        group = self._roster.held.get(request_id)
        if group is None:
            return False
        live = self._roster.live.values()
        others = sum(other.work for other in live if other.state != "held")
        self._planner.accounts.begin_to_wait(group, self._roster.waiting)
        bound = self._config.limits.wait_bound(group.work, others)
        self._roster.release(group, step=self._planner.step, wait_bound=bound)
        if self._log is not None:
            self._log.released(group)
        return True

    def reset_prefix_cache(self) -> Dropped:
        """Empty the prefix cache on an operator's order: the pool's part, the host's, and so the one on disk.

        Running and swapped groups keep their blocks and their tokens, but no other request matches those blocks any
        more. The step log records the reset, so that a replay makes it too.
        """
        if self._log is not None:
            self._log.reset()
        num_blocks, host_blocks = self._kv.forget_cached()
        return Dropped(num_blocks=num_blocks, host_blocks=host_blocks)

    def take_wrong_host_blocks(self) -> tuple[int, ...]:
        """Host blocks that results with non-finite values have emptied since the last call, for who keeps them."""
        return () if self._swapping is None else self._swapping.take_wrong()

    def answer(self, question: str, arguments: Arguments) -> object:
        """A plain value that describes this moment; `Inspection` has the questions. Raises Unanswerable."""
        return self._inspection.answer(question, arguments)

    def wait_bound(self, request_id: str) -> int:
        """Steps from submission, or release, within which the live request ends. Raises KeyError if it is not live."""
        return self._roster.live[request_id].wait_bound

    def schedule(self, now: float) -> Batch | None:
        """Plan the next step; None if there is no work, or none before another result is applied.

        The step's result is applied before the next call, or with `plans_ahead` before the call after that. The plan
        assumes that the steps in flight succeed and that every sequence in them continues. If one does not, its part of
        the next result is ignored.
        """
        if not self.has_work:
            return None
        self._step += 1
        self._kv.pins.advance(now)
        if self._log is not None:
            self._log.settle()
        plan = self._planner.plan(self._step, now)
        if self._speculation is not None:
            self._speculation.extend(plan)
        if self._roster.total_preemptions:
            self._roster.total_recomputed_tokens += plan.num_recomputed
        batch = None
        if plan.slices or plan.num_rows:
            released = self._kv.take_released()
            if self._speculation is not None:
                self._speculation.forget(released)
            if self._recorded is not None:
                self._recorded.planned(released)
            batch = plan.batch(self._step, self._kv.take_moves(), released, self._decodes.planned(plan))
        if self._log is not None:
            self._log.planned(self._step, plan, batch, self._kv.num_used, now)
        if batch is None:
            return None
        self._scheduled_at[self._step] = now
        self._advance(batch)
        return batch

    def apply(self, batch: Batch, result: StepResult, now: float) -> list[TokenOutput]:
        """`apply_result`, with all outputs made."""
        return self.apply_result(batch, result, now).every()

    def apply_result(self, batch: Batch, result: StepResult, now: float) -> Outputs:
        """Apply a step's tokens, scores and errors; returns the outputs.

        Results for sequences that ended or were preempted since `schedule` are ignored.
        """
        outputs = self._results.apply(batch, result, now)
        if self._recorded is not None:
            self._recorded.applied(batch)
        # A step that was planned ahead begins when the step before it ends.
        began = max(self._scheduled_at.pop(batch.step_id, now), self._applied_at)
        self._applied_at = now
        if self._log is not None:
            times = now - began, now
            self._log.results.append((batch.step_id, outputs.others, len(self._roster.sequences), result, times))
        sizes = {"prompt_tokens": batch.num_prefills, "num_decodes": batch.num_decodes}
        is_predicted = sizes["prompt_tokens"] or batch.step_id % _PREDICTED == 0
        predicted = self._prices.seconds_of(**sizes) if is_predicted else None
        self._applied = AppliedStep(**sizes, num_rows=batch.num_tokens, seconds=now - began, predicted=predicted or 0.0)
        self._itl.learn(**sizes, seconds=now - began)
        self._prices.learn(**sizes, seconds=now - began)
        self.kept.learn(**sizes, seconds=now - began)
        if self._swapping is not None:
            self._swapping.learn(**sizes, seconds=now - began)
        if self._speculation is not None and not sizes["prompt_tokens"]:
            self._speculation.learn(batch.num_tokens, batch.num_decodes, now - began)
        return outputs

    def skip_decodes(self, now: float, due: float, *, num_left: TokensLeft, seconds: DecodeSeconds) -> Skipped | None:
        """Take all like steps from `now` on that begin before `due`, in which every running sequence decodes.

        The scheduler is left as if each had been scheduled and applied, as a simulation does it: with no step in
        flight, no step log and no drafts. `num_left`: the tokens that a request is to get, which the scheduler may not
        know. None if there are fewer than two: then the next step is to be scheduled.
        """
        return self._note_skipped(self._fast_forward.decodes(now, due, num_left, seconds) if self._may_skip else None)

    def skip_chunks(self, now: float, due: float, *, num_left: TokensLeft, seconds: ChunkSeconds) -> Skipped | None:
        """Take, like `skip_decodes`, all chunks but the last of the one prompt beside decodes, while no request waits.

        None if not even one step is like that.
        """
        return self._note_skipped(self._fast_forward.chunks(now, due, num_left, seconds) if self._may_skip else None)

    def gather_decodes(self, is_on: bool) -> None:
        """Keep further decodes as rows from now on, or none: those that are about to be skipped are not to be."""
        self._decodes.open(is_on)

    def stats(self) -> EngineStats:
        """Gauges of this moment and counters since the start. The caller adds the step's times."""
        samples = self._fragmentation.totals(self._applied_at)
        stats = self._books.stats(last=self._applied, samples=samples)
        return self.kept.add_to(stats if self._swapping is None else self._swapping.add_to(stats))

    def check_invariants(self) -> None:
        """Raise InvariantViolation if queues, counts, tables and blocks disagree. Call between steps.

        The invariants by the numbers that the tests cite. Those with a star are checked here; missing numbers belong to
        features that this scheduler does not have.

        I1*  references: a block's count is the number of live tables that hold it, and of copies planned from it.
        I2*  partition: free, cached and used blocks are disjoint and make up the pool; so it is with the host's.
        I3   exclusive writes: no step writes to a block that is shared or can be matched.
        I4*  tables: a table has just the blocks for its reserved tokens, of which there are no more than known ones.
        I5*  limits: a step's tokens and slices, running sequences, their adapters and unfinished prompts keep to them.
        I6   no stall: a running decode gets its token in every step, unless its group is preempted in it.
        I7   elder: it is never preempted for another, and what is left of its work falls with every step.
        I8   no idling: no step is empty while a request is unfinished and not held.
        I9   gate: a request that cannot be served is refused by `add`, never later.
        I10  determinism: same calls, same plans and same outputs.
        I11  shares: under fair queueing, tenants that always wait differ by no more than `FairQueue` promises.
        I12  solo tokens: a choice gets the tokens that it gets alone, however it is batched, cut, shared or preempted.
        I14* swap: each block that a swapped sequence kept is in the pool or on the host, and comes back unchanged.
        I15  no leak: no block is used when no request is left.
        I16  gauges: `stats` equals the state, counted anew.
        I17* wait bound: a request ends within the steps that `wait_bound` named at its submission, or its last release.
        I18  replay: a step log's inputs, given to another scheduler, bring the same plans.
        I19* held: a held group has no slot, no block and no part in plans, and is never the elder.
        I20* bypasses: no group is overtaken more than `max_bypasses` times, except while it waits for a prefix, and by
             those without an adapter while its own has no room.
        """
        limits, roster = self._config.limits, self._roster
        self._planner.check()
        for group in roster.contenders():
            age = self._step - group.added_step
            require(age < group.wait_bound, f"request {group.request.request_id} is alive after {age} steps")
            require(group.num_bypasses <= limits.max_bypasses, f"{group.num_bypasses} bypasses of one request")

    @property
    def _may_skip(self) -> bool:
        return not self._scheduled_at and self._log is None and self._speculation is None and self._recorded is None

    def _note_skipped(self, skipped: Skipped | None) -> Skipped | None:
        if skipped is not None:
            self._step += len(skipped.ends)
            self._applied_at = skipped.ends[-1]
            num_decodes = len(skipped.request_ids)
            prompt_tokens = skipped.prompt_tokens[-1] if skipped.prompt_tokens else 0
            self._applied = AppliedStep(
                prompt_tokens=prompt_tokens, num_decodes=num_decodes, num_rows=prompt_tokens + num_decodes
            )
        return skipped

    def _advance(self, batch: Batch) -> None:
        """Count the batch as computed; a finished prompt is forked to the choices that wait for it."""
        sequences = self._roster.sequences
        self._decodes.advance(batch)
        for item in batch.others:
            sequence = sequences.get(item.sequence_id)
            if sequence is None or item.run != sequence.group.num_preemptions:
                continue
            group, end = sequence.group, item.end - item.num_drafts
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Cached blocks that `reset_prefix_cache` has forgotten."""

    num_blocks: int  # unreferenced blocks of the pool
    host_blocks: tuple[int, ...]  # blocks of host memory; their files on disk are to be deleted too


_FEW = 64  # entries of ended requests that are not worth a clean-up


class Deadlines:
    """The deadlines of live requests, the earliest first; `due` returns each once and none early.

    Entries of ended requests are removed when they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request: GenerationRequest, live: Collection[str]) -> None:
        """Add a request's deadline, if it has one. `live`: the ids of all unfinished requests."""
        if request.deadline is None:
            return
        if len(self._heap) > 2 * len(live) + _FEW:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)
        heappush(self._heap, (request.deadline, request.request_id))

    def due(self, now: float) -> list[str]:
        """The ids of the requests whose deadline has passed; ended requests may be among them."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heappop(self._heap)[1])
        return due
