"""The engine: one scheduler and one executor behind `EnginePort`. Its owner calls `step`.

Promises: every submitted request ends in exactly one terminal output per choice unless it is aborted; the engine does
nothing between calls. Must not know: processes, sockets, threads, text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import add
from typing import Any, Protocol

from quire_engine.contract.batch import Batch, StepResult
from quire_engine.contract.errors import InfeasibleRequest, ModelLoadError, Unanswerable
from quire_engine.contract.token_columns import Outputs, step_output
from quire_engine.contract.types import (
    DEADLINE_EXCEEDED,
    DEADLINE_PASSED,
    FORGET_ADAPTER,
    LOAD_ADAPTER,
    NAME_MODEL,
    RESET_PREFIX_CACHE,
    Adapter,
    AdaptersInUse,
    EngineHealth,
    GenerationRequest,
    StepOutput,
    TokenOutput,
)
from quire_engine.scheduling.adapter_turns import AdapterTurns
from quire_engine.scheduling.scheduler import Scheduler

_PREPARING_SECONDS = 0.01  # the longest wait for a grammar, so that aborts and other requests are seen


class StepExecutor(Protocol):
    """Computes batches in the order of their launch; `execution.executor.Executor`, or a fake in tests."""

    @property
    def max_in_flight(self) -> int:
        """The most steps that are launched and not collected: 1, or 2 for an asynchronous executor."""
        ...

    def launch(self, batch: Batch) -> None:
        """Begin a step, or compute it. With another step in flight its ids may be PENDING: that step's samples."""
        ...

    def collect(self) -> StepResult:
        """Wait for the earliest step in flight and return its result."""
        ...

    def forget_host_blocks(self, blocks: Sequence[int]) -> None:
        """Delete the contents on disk of blocks of host memory that will not be read again."""
        ...

    def prepare(self) -> int:
        """Do one piece of work that a later step would wait for, some 30 ms; how many are left."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars in parallel to the steps; `execution.constrained.grammars`, or a fake in tests."""

    def prepare(self, text: str, scope: str) -> bool:
        """Whether this scope's grammar is compiled or known to be invalid; otherwise its compilation begins."""
        ...

    def error(self, text: str) -> str | None:
        """Why a prepared grammar is invalid; None if it is valid."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until one more grammar is ready, at most `seconds`."""
        ...

    def warm_up(self) -> None:
        """Do the work that the first grammar would wait for, while the engine is idle."""
        ...


class AdapterStore(Protocol):
    """Reads adapters in parallel to the steps; `execution.adapters`, or a fake in tests."""

    @property
    def leaving(self) -> Collection[str]:
        """Digests of those whose place is wanted for others, and which therefore take no further requests."""
        ...

    def prepare(self, adapter: Adapter, in_use: AdaptersInUse) -> str | None:
        """Empty once requests may compute with it, or the reason why none can; None: later."""
        ...

    def order(self, name: str, path: str, in_use: AdaptersInUse) -> dict[str, Any] | None:
        """Load an adapter by an order of this name: its facts, or None: ask again. Raises ModelLoadError."""
        ...

    def forget(self, digest: str, in_use: AdaptersInUse) -> None:
        """No further requests will come for it."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until one more adapter is read, at most `seconds`."""
        ...


def _discard(_: StepOutput) -> None:
    pass


class Engine:
    """Continuous batching, one step at a time; with an asynchronous executor, steps are planned one ahead."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterStore | None = None,
        check_invariants: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_step: Callable[[StepOutput], None] = _discard
        self._scheduler = scheduler
        self._grammars = grammars  # None: a grammar is compiled in the step that needs it
        self._adapters = adapters  # None: requests with an adapter are refused
        # By id the requests whose grammars are being compiled, whose adapters are being read or have no turn, or whose
        # kept prefixes are being read.
        self._preparing: dict[str, GenerationRequest] = {}
        self._unloadable: dict[str, str] = {}  # by request: why its adapter cannot be loaded
        self._turns = AdapterTurns(scheduler.roster, scheduler.limits, scheduler.hold)
        self._held_early: set[str] = set()  # requests in `_preparing` that are to be held once they are ready
        self._kept = scheduler.kept
        self._executor = executor
        self._check_every_step = check_invariants
        self._clock = clock
        self._step_id = 0
        self._busy_seconds = 0.0  # in steps before this one
        self._num_padding_rows = 0  # sum over all steps
        self._rank_seconds: tuple[float, ...] = ()  # likewise
        self._in_flight: deque[Batch] = deque()  # launched and not collected, in order
        self._unsent: list[TokenOutput] = []  # refusals, sent with the next StepOutput
        self._stats_changed = False
        self._checked = True  # nothing has happened since the last check of the invariants

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        waits = bool(self._preparing) or bool(self._in_flight)
        return self._scheduler.has_work or waits or bool(self._unsent) or self._stats_changed

    def submit(self, request: GenerationRequest) -> None:
        # One that waits for an adapter is not overtaken by later ones, for whose sake it might wait for ever.
        if (request.adapter is not None and self._preparing) or not self._is_prepared(request, self._turns.in_use):
            self._preparing[request.request_id] = request
            return
        self._admit(request)

    def _is_prepared(self, request: GenerationRequest, in_use: AdaptersInUse, *, is_beginning: bool = False) -> bool:
        """Whether nothing has to be compiled or read any more; what has begins.

        `is_beginning`: its adapter's turn begins, so that it may join though others wait for the adapter's place.
        """
        grammar, adapter, is_ready = request.sampling.grammar, request.adapter, True
        if grammar and self._grammars is not None:
            is_ready = self._grammars.prepare(grammar, request.cache_scope)
        if adapter is not None and self._adapters is not None and not is_beginning:
            wrong = self._adapters.prepare(adapter, in_use)
            if wrong:
                self._unloadable[request.request_id] = wrong
            is_ready = is_ready and wrong is not None
        if request.request_id in self._unloadable:
            return True
        others = len(self._preparing) - (request.request_id in self._preparing)
        is_alone = not (others or self._scheduler.has_work or self._in_flight)
        return is_ready and self._kept.is_ready(request, self._clock, is_alone=is_alone)

    def _admit(self, request: GenerationRequest) -> None:
        """Add the request to the scheduler, or refuse it."""
        grammar = request.sampling.grammar
        wrong = self._grammars.error(grammar) if grammar and self._grammars is not None else None
        if wrong is not None:
            self._refuse(request, wrong, culprit=True)
            return
        if request.adapter is not None:
            lacking = self._unloadable.pop(request.request_id, "")
            if lacking or self._adapters is None:
                self._refuse(request, lacking or "this engine computes no adapters")
                return
        try:
            self._scheduler.add(request, self._clock())
        except InfeasibleRequest as refusal:
            self._refuse(request, str(refusal))
        if request.request_id in self._held_early:
            self._held_early.discard(request.request_id)
            self._scheduler.hold(request.request_id)

    def _refuse(self, request: GenerationRequest, error: str, *, code: str = "", culprit: bool = False) -> None:
        self._unloadable.pop(request.request_id, None)
        self._held_early.discard(request.request_id)
        self._unsent += [
            TokenOutput(
                request_id=request.request_id,
                choice=choice,
                finish="error",
                error=error,
                error_code=code,
                culprit=culprit,
            )
            for choice in range(request.n)
            if choice not in request.finished_choices
        ]

    def abort(self, request_id: str) -> None:
        self._held_early.discard(request_id)
        was_preparing = self._preparing.pop(request_id, None) is not None
        self._turns.forget(request_id)
        self._kept.withdraw(request_id)
        self._unloadable.pop(request_id, None)
        if self._scheduler.abort(request_id) or was_preparing:
            self._stats_changed = True

    def hold_request(self, request_id: str) -> None:
        if request_id in self._turns:  # held already
            self._turns.forget(request_id)
            del self._preparing[request_id]
        elif request_id in self._preparing:
            self._held_early.add(request_id)
        elif self._scheduler.hold(request_id):
            self._stats_changed = True

    def release_request(self, request_id: str) -> None:
        self._held_early.discard(request_id)
        if request_id in self._preparing:
            return
        held = self._turns.come_back(request_id)
        if held is None:
            self._scheduler.release(request_id)
        else:  # its adapter's place may have been given to another one
            self._preparing[request_id] = held

    def inspect(self, what: str, arguments: Mapping[str, Any]) -> object:
        """A plain value that answers a question about the current state. Raises Unanswerable."""
        return self._scheduler.answer(what, arguments)

    def control(self, what: str, arguments: Mapping[str, Any]) -> object:
        """Carry out an operator's order; returns a plain value that describes the effect. Raises Unanswerable."""
        if what in {LOAD_ADAPTER, FORGET_ADAPTER}:
            return self._control_adapters(what, arguments)
        if what == NAME_MODEL:
            self._kept.name_model(str(arguments["digest"]))
            return {}
        if what != RESET_PREFIX_CACHE or arguments:
            raise Unanswerable(f"there is no such order; there is {RESET_PREFIX_CACHE}, without arguments")
        dropped = self._scheduler.reset_prefix_cache()
        if dropped.host_blocks:
            self._executor.forget_host_blocks(dropped.host_blocks)
        self._stats_changed = True
        return {"device_blocks": dropped.num_blocks, "host_blocks": len(dropped.host_blocks)}

    def _control_adapters(self, what: str, arguments: Mapping[str, Any]) -> object:
        """Load an adapter, null until that is done, or forget one."""
        if self._adapters is None:
            raise Unanswerable("adapters are not enabled")
        if what == FORGET_ADAPTER:
            self._adapters.forget(str(arguments["digest"]), self._turns.in_use)
            return {}
        try:
            return self._adapters.order(str(arguments["order"]), str(arguments["path"]), self._turns.in_use)
        except ModelLoadError as error:
            raise Unanswerable(str(error)) from None

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, step_id=self._step_id, has_work=self._scheduler.has_work)

    def rest(self) -> None:
        """The engine has been idle for a while: check the invariants, once, since that is slow with many blocks."""
        if not self._checked:
            self._check()
        if self._kept.has_news():
            self._stats_changed = True  # the next step, without a batch, reports the blocks written since the last one
        if self._grammars is not None:
            self._grammars.warm_up()

    def prepare(self) -> bool:
        """Do a piece of work that a later step would wait for, where there is one; whether there are more."""
        return not self.has_work and self._executor.prepare() > 0

    def step(self) -> None:
        """Schedule and launch a step, collect and apply the earliest one, call `on_step` with the outputs.

        With an asynchronous executor the collected step is the one that the previous call launched, so the executor has
        the next step already when it ends. That step was planned as if every sequence continued; its results for
        sequences that have ended are dropped.
        """
        if self._adapters is not None:
            self._take_turns(self._adapters)
        if self._preparing:
            self._admit_prepared()
        started = self._clock()
        self._compute(started)
        self._busy_seconds += self._clock() - started

    def _compute(self, started: float) -> None:
        """Do what `step` does, at `started`, with the requests that have all they need."""
        refused, self._unsent = self._unsent, []
        outputs = Outputs(others=refused + self._scheduler.expire(started))
        execute_seconds, num_in_flight = 0.0, len(self._in_flight)
        if self._in_flight and self._scheduler.needs_results:
            outputs, seconds = self._collect(outputs)
            execute_seconds += seconds
        batch = self._scheduler.schedule(started)
        if batch is not None:
            launched = self._clock()
            self._executor.launch(batch)
            execute_seconds += self._clock() - launched
            self._in_flight.append(batch)
            num_in_flight += 1
        if self._in_flight and (batch is None or len(self._in_flight) == self._executor.max_in_flight):
            outputs, seconds = self._collect(outputs)
            execute_seconds += seconds
        self._checked = False
        if self._check_every_step:
            self._check()
        if batch is None and not len(outputs) and not self._stats_changed:
            return
        self._stats_changed = False
        step_seconds = self._clock() - started
        if len(self._in_flight) == num_in_flight:  # no step has ended: the numbers are still those of the one before
            execute_seconds = 0.0
        stats = replace(
            self._scheduler.stats(),
            step_seconds=step_seconds,
            host_seconds=step_seconds - execute_seconds,
            total_busy_seconds=self._busy_seconds + step_seconds,
            total_padding_rows=self._num_padding_rows,
            total_rank_seconds=self._rank_seconds,
        )
        preparing = {each.adapter.name for each in self._preparing.values() if each.adapter is not None}
        if preparing:
            stats = replace(stats, waiting_adapters=stats.waiting_adapters | preparing)
        self.on_step(
            step_output(
                outputs,
                step_id=self._step_id,
                stats=stats,
                prefixes=self._scheduler.take_prefixes(),
                cache_events=self._scheduler.take_cache_events(),
            )
        )

    def _admit_prepared(self) -> None:
        """Admit requests that have all they need; if there is nothing else to do, wait shortly for one."""
        if not (self._scheduler.has_work or self._in_flight or self._unsent):
            has_adapters = any(request.adapter is not None for request in self._preparing.values())
            compiles_or_reads = self._adapters if has_adapters else self._grammars
            waits_for = self._kept if self._kept.is_reading else compiles_or_reads
            if waits_for is not None:
                waits_for.wait(_PREPARING_SECONDS)
        now, in_use = self._clock(), self._turns.in_use
        active, beginning = {*in_use.active}, set[str]()
        self._kept.take_in(now)
        for request in list(self._preparing.values()):
            digest = "" if request.adapter is None else request.adapter.digest
            is_back = request.request_id in self._turns
            if is_back and self._turns.is_over(request):
                self._turns.forget(request.request_id)
                del self._preparing[request.request_id]
                continue
            if not is_back and request.deadline is not None and request.deadline <= now:
                del self._preparing[request.request_id]
                self._kept.withdraw(request.request_id)
                self._refuse(request, DEADLINE_PASSED, code=DEADLINE_EXCEEDED)
                continue
            if is_back and not self._turns.may_go_on(request):
                continue
            was_active = digest in active
            if self._is_prepared(request, AdaptersInUse(active, in_use.held), is_beginning=digest in beginning):
                if digest and not was_active and request.request_id not in self._unloadable:
                    beginning.add(digest)
                del self._preparing[request.request_id]
                (self._go_on if is_back else self._admit)(request)
            if digest:  # the place of one that is ready is not for those behind it
                active.add(digest)

    def _go_on(self, request: GenerationRequest) -> None:
        """A request that was set aside has its adapter again, or the reason why it cannot."""
        self._turns.forget(request.request_id)
        lacking = self._unloadable.pop(request.request_id, "")
        if lacking:
            self._unsent += self._scheduler.fail(request.request_id, lacking)
        else:
            self._scheduler.release(request.request_id)

    def _take_turns(self, adapters: AdapterStore) -> None:
        """Set aside the requests of an adapter that others have waited for long enough."""
        for request in self._turns.step(adapters.leaving, self._preparing):
            self._preparing[request.request_id] = request
            self._stats_changed = True

    def _collect(self, before: Outputs) -> tuple[Outputs, float]:
        """Apply the earliest step in flight; returns all outputs, and the seconds spent waiting for the step."""
        batch = self._in_flight.popleft()
        started = self._clock()
        result = self._executor.collect()
        finished = self._clock()
        outputs = self._scheduler.apply_result(batch, result, finished).behind_others(before)
        if result.non_finite:
            wrong = self._scheduler.take_wrong_host_blocks()
            if wrong:
                self._executor.forget_host_blocks(wrong)
        self._step_id = batch.step_id
        self._num_padding_rows += result.num_padding_rows
        if result.rank_seconds:
            until_now = self._rank_seconds or (0.0,) * len(result.rank_seconds)
            self._rank_seconds = tuple(map(add, until_now, result.rank_seconds))
        return outputs, finished - started

    def _check(self) -> None:
        self._scheduler.check_invariants()
        self._checked = True
