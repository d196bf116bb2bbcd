"""The engine's loop in simulation: the real scheduler, a clock that the cost model advances, requests that arrive.

Owns the clock and the outcome of each request. Promises: the same load and setup give the same outcome, to the bit;
requests arrive between steps, as in the engine process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from quire_bench.traces import TraceRow
from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.decodes import BatchInColumns
from quire_engine.contract.errors import InfeasibleRequest
from quire_engine.contract.token_columns import Stream
from quire_engine.contract.types import TokenOutput
from quire_engine.scheduling.running_decodes import FEWEST
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import Speculation
from quire_lab.simulation.guessing import SimulatedDrafter, drawn
from quire_lab.simulation.outcome import Moment, Outcome, Served
from quire_lab.simulation.prefix_match import matching
from quire_lab.simulation.requests import DecodingRows, as_request, number_of, own_token
from quire_lab.simulation.setup import Setup

_PAUSE = 4  # steps after which a leap is tried again where a step is cheap
_MOMENTS = 4096  # most moments of a run; beyond them every second one is dropped
Watcher = Callable[[Batch, float, float], None]  # (step, its beginning, its end)


class Simulation:
    """One run over one load."""

    def __init__(
        self, setup: Setup, *, watch: Watcher | None = None, leaps: bool = True, columns_from: int | None = FEWEST
    ) -> None:
        """`watch` is called for every step. `leaps`: take equal steps at once. `columns_from`: see `Scheduler`."""
        self._setup = setup
        self._cost = setup.cost
        # Without a step log: it would lack the steps of leaps, and nothing reads it.
        config = replace(setup.scheduler, limits=replace(setup.scheduler.limits, step_log=0))
        guesses = SimulatedDrafter(self._share_of)
        speculate = partial(Speculation, guesses, plans_ahead=config.plans_ahead) if setup.speculation else None
        allocate = matching(setup.prefix_match, config)
        columns_from = columns_from if allocate is None else None  # whose blocks the others would not hear of
        self._scheduler = Scheduler(config, speculate=speculate, columns_from=columns_from, allocate=allocate)
        self._rows = DecodingRows()
        self._watch = watch
        self._leaps = leaps and watch is None and not setup.scheduler.plans_ahead and not setup.speculation
        self._now = 0.0
        self._live: dict[str, Served] = {}
        self._samples: dict[str, tuple[SampledToken, ...]] = {}  # of live requests: each has its own token
        self._leap_from = 0  # the step before which none is tried
        self._streams: tuple[Stream, ...] = ()  # of the last step with columns
        self._streaming: list[Served] = []  # the same
        self._live_tokens = 0  # prompt tokens of live requests
        self._in_flight: deque[tuple[Batch, float]] = deque()  # steps in flight, with the time of their end
        self._free_at = 0.0  # when the executor becomes idle
        self._block_size = setup.scheduler.limits.block_size
        self._stride, self._since = 1, 0  # sampling of moments
        self.outcome = Outcome(num_blocks=setup.scheduler.num_blocks)

    def run(self, rows: Sequence[TraceRow], *, speed: float = 1.0) -> Outcome:
        """Serve the whole load to its end; arrivals come `speed` times as fast."""
        for number, row in enumerate(rows):
            sent = row.at / speed
            self.advance(sent + self._cost.request)
            self.arrive(row, number, sent)
        self.advance(float("inf"))
        return self.finish()

    def advance(self, until: float) -> None:
        """Take steps until the clock is at `until` or, by the rest of a step, behind it; without work it rests."""
        scheduler = self._scheduler
        while (scheduler.has_work or self._in_flight) and self._now < until:
            if not (self._leaps and self._leap(until)):
                self._step()
        if until < float("inf"):
            self._now = max(self._now, until)

    def finish(self) -> Outcome:
        """The outcome with the counts of the whole run."""
        outcome, stats = self.outcome, self._scheduler.stats()
        outcome.seconds = self._now
        outcome.total_preemptions, outcome.evictions = stats.total_preemptions, stats.total_kv_evictions
        outcome.preemptions_by_cause = stats.total_preemptions_by_cause
        outcome.recomputed_tokens = stats.total_recomputed_tokens
        outcome.guessed_tokens, outcome.guessed_right = stats.total_draft_tokens, stats.total_accepted_tokens
        return outcome

    def arrive(self, row: TraceRow, number: int, at: float) -> None:
        """Put a request into the queue if it has room, as the server decides; `at`: when it was sent."""
        served = Served(row=row, number=number, at=at)
        self.outcome.requests.append(served)
        limit = self._setup.max_num_queued_tokens
        if len(self._live) + 1 > self._setup.max_sequences:
            served.refused = "max_num_queued_reqs"
        elif limit is not None and self._live and self._live_tokens + row.input_tokens > limit:
            served.refused = "max_num_queued_tokens"
        else:
            request = as_request(row, number, at=self._now, max_model_len=self._setup.scheduler.max_model_len)
            try:
                self._scheduler.add(request, self._now)
            except InfeasibleRequest as refusal:
                served.refused, served.why = "infeasible", str(refusal)
            else:
                self._live[request.request_id] = served
                self._samples[request.request_id] = own_token(number)
                self._live_tokens += row.input_tokens
                self.outcome.note_live(self._now, len(self._live))

    def _step(self) -> None:
        """Plan and launch a step; with one in flight, or nothing to plan, take in the earliest."""
        if self._in_flight and self._setup.speculation and self._scheduler.needs_results:
            self._collect()
        batch = self._scheduler.schedule(self._now)
        if batch is not None:
            seconds = self._cost.seconds(batch)
            begins = max(self._now, self._free_at)
            self._free_at = begins + seconds
            self._in_flight.append((batch, self._free_at))
            self._note_step(batch, begins)
        if batch is None or not self._setup.scheduler.plans_ahead or len(self._in_flight) > 1:
            self._collect()

    def _collect(self) -> None:
        batch, ended = self._in_flight.popleft()
        self._now = max(self._now, ended)
        # Where none is left waiting, leaps are likely, which take each decode by itself.
        self._scheduler.gather_decodes(bool(self._scheduler.roster.waiting))
        decoded = self._rows.tokens(batch.decodes) if isinstance(batch, BatchInColumns) else None
        result = StepResult(samples=self._sampled(batch), decoded=decoded)
        outputs = self._scheduler.apply_result(batch, result, self._now)
        if not outputs.streams:
            for output in outputs.others:
                self._take(output)
            return
        if outputs.streams is not self._streams:
            self._streams = outputs.streams
            self._streaming = [self._live[stream.request_id] for stream in outputs.streams]
        served = self._streaming
        for some, others in outputs.parts():
            self._take_tokens(served[some])
            for output in others:
                self._take(output)

    def _sampled(self, batch: Batch) -> dict[int, tuple[SampledToken, ...]]:
        """The samples of slices that are not in columns; none for sequences that have ended since the step's plan."""
        sequences, samples = self._scheduler.roster.sequences, {}
        for item in batch.others:
            if item.wants_sample and (sequence := sequences.get(item.sequence_id)) is not None:
                name = sequence.group.request.request_id
                self._rows.note(item.sequence_id, item.num_prompt_tokens, self._live[name])
                drafts = item.token_ids[len(item.token_ids) - item.num_drafts :]
                samples[item.sequence_id] = drawn(self._samples[name], drafts, self._live[name].num_left)
        return samples

    def _share_of(self, token_id: int) -> float:
        """The share of guesses that are right, of the request whose outputs repeat this token."""
        own = self.outcome.requests[number_of((token_id,))].row.speculation
        return self._setup.speculation if own is None else own

    def _note_step(self, batch: Batch, begins: float) -> None:
        outcome = self.outcome
        used = self._scheduler.num_used_blocks
        if used > outcome.peak_blocks:
            outcome.peak_blocks, outcome.peak_step = used, outcome.steps
        outcome.steps += 1
        outcome.block_steps += used
        outcome.busy_seconds += self._free_at - begins
        outcome.computed_tokens += batch.num_tokens
        outcome.decode_tokens += batch.num_decodes
        self._note_moment(begins, used, batch.num_items)
        if self._watch is not None:
            self._watch(batch, begins, self._free_at)

    def _note_moment(self, at: float, used: int, running: int) -> None:
        self._since += 1
        if self._since < self._stride:
            return
        self._since, moments = 0, self.outcome.moments
        moments.append(Moment(at=at, blocks_used=used, running=running, waiting=len(self._live) - running))
        if len(moments) >= 2 * _MOMENTS:
            del moments[::2]
            self._stride *= 2

    def _take_tokens(self, served: list[Served]) -> None:
        """One more token of each, none of them the first or the last."""
        now = self._now
        self.outcome.gaps.extend([now - one.last_at for one in served])
        for one in served:
            one.last_at = now
            one.num_tokens += 1

    def _take(self, output: TokenOutput) -> None:
        now, served = self._now, self._live[output.request_id]
        if served.num_tokens == 0:
            served.first_at = now
            served.cached_tokens = output.num_cached_tokens
            if output.timing is not None:
                served.queue_seconds = output.timing.queue_seconds
        else:
            self.outcome.gaps.append(now - served.last_at)
        served.last_at = now
        served.num_tokens += len(output.token_ids)
        if output.finish is not None:
            self._end(output, served)

    def _end(self, output: TokenOutput, served: Served) -> None:
        del self._live[output.request_id], self._samples[output.request_id]
        self._live_tokens -= served.row.input_tokens
        self.outcome.note_live(self._now, len(self._live))
        served.ended_step = self.outcome.steps
        if output.timing is not None:
            served.preemptions = output.timing.num_preemptions
        computed = served.row.input_tokens + served.num_tokens - 1
        self.outcome.cumulative_blocks += -(-computed // self._block_size)

    def _leap(self, due: float) -> bool:
        """Take all steps at once that only repeat the last; False if not even two do."""
        if self.outcome.steps < self._leap_from:
            return False
        scheduler, cost = self._scheduler, self._cost
        taken = scheduler.skip_decodes(self._now, due, num_left=self._num_left, seconds=cost.decode_seconds)
        if taken is None:
            taken = scheduler.skip_chunks(self._now, due, num_left=self._num_left, seconds=cost.chunk_seconds)
        if taken is None:
            self._leap_from = self.outcome.steps + (_PAUSE if scheduler.num_rows else 0)
            return False
        outcome, gaps = self.outcome, self.outcome.gaps
        count, running = len(taken.ends), len(taken.request_ids)
        first_gaps = [taken.ends[0] - self._live[name].last_at for name in taken.request_ids]
        gaps.extend(first_gaps)
        for before, after in pairwise(taken.ends):
            gaps.extend([after - before] * running)
        for name in taken.request_ids:
            served = self._live[name]
            served.last_at = taken.ends[-1]
            served.num_tokens += count
        begins = self._now
        for used, end in zip(taken.blocks_used, taken.ends, strict=True):
            if used > outcome.peak_blocks:
                outcome.peak_blocks, outcome.peak_step = used, outcome.steps
            outcome.steps += 1
            outcome.block_steps += used
            outcome.busy_seconds += end - begins
            self._note_moment(begins, used, running + bool(taken.prompt_tokens))
            begins = end
        outcome.computed_tokens += count * running + sum(taken.prompt_tokens)
        outcome.decode_tokens += count * running
        self._now = self._free_at = taken.ends[-1]
        return True

    def _num_left(self, request_id: str) -> int:
        return self._live[request_id].num_left


def simulate(setup: Setup, rows: Sequence[TraceRow], *, speed: float = 1.0, watch: Watcher | None = None) -> Outcome:
    """Simulate a load. Raises ConfigError for a setup that contradicts itself."""
    return Simulation(setup, watch=watch).run(rows, speed=speed)
