"""Several engines behind one `EnginePort`: each request goes to one of them, and to another one if that is lost.

Promises: a stream is lost only if no engine of its numerics comes back in time, and no token is delivered twice; only
requests without suspicion move. `local_replicas` and `nodes.node_set` know which engines there are, and how they start.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import EngineHealth, EngineStats, GenerationRequest, KVSource, StepOutput, TokenOutput
from quire_engine.process.transport import LoadProgress
from quire_engine.routing.fleet import Wanted
from quire_engine.routing.views import Route
from quire_server.engine.awake_timer import AwakeTimer
from quire_server.engine.prompt_sources import PromptSources
from quire_server.engine.recovery import JournalEntry, Quarantine
from quire_server.engine.replica_questions import EPOCH, ReplicaQuestions
from quire_server.engine.replica_routing import Router, RouteTaken, Standing, num_known_tokens
from quire_server.engine.stats_sum import StatsSum
from quire_server.engine.supervisor import EngineState
from quire_server.errors import ReplicaLost

FAILOVER_SECONDS = 30.0  # that a stream waits for an engine where none is left
MOST_LOSSES = 2  # of a request's engines, without a token in between; it gets no third one
MOST_SILENT = (
    4  # of those that were only out of reach: a machine that a request has stopped is not told from a cut wire
)
_MOST_ENDED = 4096  # ended requests whose replica is known to `inspect`
_SLOW_LINE_SECONDS = 5.0  # between two lines about late first tokens

# A stream lost its replica; the replica with a part of the prompt cached; or else by what is ahead of it.
ROUTE_REASONS = ("moved", "cached", "load")

log = logging.getLogger("quire.replicas")


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """One engine and what the front knows of it."""

    name: str
    engine: ReplicaEngine
    draining: bool = False  # by an operator's order
    streams: dict[str, Stream] = field(default_factory=dict)  # by the client's request id
    tokens_ahead: int = 0  # prompt tokens of streams without an output since they came here

    @property
    def is_draining(self) -> bool:
        return self.draining or self.engine.is_draining

    @property
    def plan(self) -> EnginePlan | None:
        return self.engine.plan

    @property
    def is_ready(self) -> bool:
        """Whether it takes new requests."""
        return self.engine.state is EngineState.READY and not self.is_draining and not self.engine.is_proving

    @property
    def lends(self) -> bool:
        """Whether other replicas can fetch KV blocks from it."""
        return self.engine.plan is not None and bool(self.engine.plan.transfer.address)

    @property
    def is_for_prompts(self) -> bool:
        """Whether it computes prompts for others, and answers only where no other replica can."""
        return self.engine.plan is not None and self.engine.plan.transfer.role == "prefill"

    def adopt(self, entry: JournalEntry) -> None:
        self.engine.adopt(entry)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    @property
    def numerics(self) -> str:
        plan = self.engine.plan
        return "" if plan is None else plan.identity.numerics


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """A live request: which engine has it, under which name.

    Every engine that it moves to gets it under another name, its epoch, so that outputs of an earlier one belong to no
    stream.
    """

    request: GenerationRequest
    replica: Replica | None = None  # None: no engine can take it
    entry: JournalEntry | None = None  # while no replica has it
    epoch: int = 0
    unanswered: int = 0  # prompt tokens, until its first output from this replica
    numerics: str = ""  # of the engine that its tokens are from; empty: none yet
    num_silent: int = 0  # engines that were out of reach with it, since its last output
    moved_at: float | None = None  # when it lost its engine, until its next output
    timer: AwakeTimer | None = None  # the end of the wait for an engine
    blocks: tuple[int, ...] | None = None  # names of its prompt's blocks; None: not hashed yet
    routes: list[RouteTaken] = field(default_factory=list)  # one for each engine that it was given to

    @property
    def run_id(self) -> str:
        """The request's name in the engine: its id, and the epoch after the first."""
        return f"{self.request.request_id}{EPOCH}{self.epoch}" if self.epoch else self.request.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """A replica for operators."""

    name: str
    state: str  # of its engine
    draining: bool
    streams: int
    prompt_tokens_ahead: int
    restarts: int
    numerics: str
    pid: int | None  # of its engine; None: there is none
    why: str = ""  # why it does not serve, where that needs words

    @property
    def is_up(self) -> bool:
        return self.state == EngineState.READY.value


class _Ended(NamedTuple):
    """An ended request: the replica that had it last, its name there, and its routes."""

    replica: str
    run_id: str
    routes: Sequence[RouteTaken]


class ReplicaEngine(Protocol):
    """The engine of a replica: a `Supervisor` with an engine of this machine, or a node on another one."""

    on_step: Callable[[StepOutput], None]
    on_restart: Callable[[], None]
    on_ready: Callable[[], None]
    on_lost: Callable[[], None]
    state: EngineState

    @property
    def plan(self) -> EnginePlan | None: ...
    @property
    def restarts(self) -> int: ...
    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new, by its own word."""
        ...

    @property
    def elsewhere(self) -> tuple[int, int]:
        """Prompt tokens ahead, and requests, that it has from others than this front."""
        ...

    @property
    def why(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def is_proving(self) -> bool: ...
    @property
    def progress(self) -> LoadProgress | None: ...
    def load_ratio(self) -> float: ...
    def trouble(self) -> str | None: ...
    def overdue_seconds(self) -> float: ...
    def health(self) -> EngineHealth: ...
    def adopt(self, entry: JournalEntry) -> None: ...
    def has(self, request_id: str) -> bool: ...
    def take(self, request_id: str) -> JournalEntry | None: ...
    def surrender(self, *, suspects: bool) -> list[JournalEntry]: ...
    def abort(self, request_id: str) -> None: ...
    def hold_request(self, request_id: str) -> None: ...
    def release_request(self, request_id: str) -> None: ...
    async def inspect(self, what: str, argument: str = "{}") -> bytes: ...
    async def control(self, what: str, argument: str = "{}") -> bytes: ...
    async def stop(self) -> None: ...


class ReplicaSet:
    """Several engines as one: see `quire_server.engine.engines.Engines`. How they come to be is the subclasses'."""

    def __init__(
        self, *, router: Router, failover_seconds: float = FAILOVER_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`failover_seconds`: see `FAILOVER_SECONDS`."""
        self.on_step: Callable[[StepOutput], None] = lambda _: None
        self.on_restart: Callable[[], None] = lambda: None
        self.on_route: Callable[[str], None] = lambda _: None  # called with each decision's reason, of ROUTE_REASONS
        self.on_move: Callable[[], None] = lambda: None  # a stream has lost its engine, or is drained off it
        self.on_moved: Callable[[float], None] = lambda _: None  # a stream's next output came after so many seconds
        self.on_members: Callable[[], None] = lambda: None  # replicas have joined or left, or tell other sizes
        # A replica's first output for a request came: its name, the predicted and the seen seconds to it.
        self.on_answered: Callable[[str, float, float], None] = lambda *_: None
        self.quarantine = Quarantine()
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._router, self._clock = router, clock
        self.sources = PromptSources(router)
        router.on_answered = lambda *answered: self.on_answered(*answered)  # noqa: PLW0108 - it is set later
        self._failover_seconds = failover_seconds
        self._replicas: dict[str, Replica] = {}
        self._streams: dict[str, Stream] = {}
        self._ended: dict[str, _Ended] = {}  # the last ended requests
        self._told_slow = -math.inf  # when the last line about a late first token was written
        self._engines: dict[str, ReplicaEngine] = {}
        self._questions = ReplicaQuestions(self._engines, self._find, self.routes)
        self.inspect = self._questions.inspect
        self._sums = StatsSum()
        self._stopped = False

    # ---------------------------------------------------------------- life

    @property
    def num_replicas(self) -> int:
        """Engines, whether or not they serve now."""
        return len(self._replicas)

    def whole_plan(self, plan: EnginePlan) -> EnginePlan:
        """The plan of all engines together, for sums: their pools and threads. `plan`: what requests are held against.

        An engine that has none yet counts as one with that plan.
        """
        plans = [each.plan or plan for each in self._engines.values()]
        scheduler = replace(plan.scheduler, num_blocks=sum(each.scheduler.num_blocks for each in plans))
        machine = replace(plan.machine, num_threads=sum(each.machine.num_threads for each in plans))
        pool = replace(
            plan.pool,
            num_bytes=sum(each.pool.num_bytes for each in plans),
            kept_blocks=sum(each.pool.kept_blocks for each in plans),
        )
        return replace(plan, machine=machine, pool=pool, scheduler=scheduler)

    def _join(self, name: str, engine: ReplicaEngine) -> Replica:
        """A replica more, with nothing cached."""
        made = self._replicas[name] = Replica(name=name, engine=engine)
        self._engines[name] = engine
        self._router.joins(name)
        engine.on_step = lambda step: self._deliver(made, step)
        engine.on_restart = lambda: self.on_restart()  # noqa: PLW0108 - it is set later
        engine.on_lost = lambda: self._lost(made)
        engine.on_ready = lambda: self._ready(made)
        return made

    async def stop(self) -> None:
        """End all engines; unfinished requests end with an error. Idempotent."""
        self._stopped = True
        await asyncio.gather(*(each.stop() for each in self._engines.values()))
        for stream in list(self._streams.values()):
            self._fail(stream, "the server is shutting down")

    @property
    def progress(self) -> LoadProgress | None:
        """The progress of the start that is least far, as last reported."""
        if not self._engines:
            return None
        return min(self._engines.values(), key=lambda each: each.load_ratio()).progress

    def load_ratio(self) -> float:
        """The mean progress of all loads, 0 to 1; 1 once every engine is ready."""
        return sum(each.load_ratio() for each in self._engines.values()) / max(self.num_replicas, 1)

    def trouble(self) -> str | None:
        """Why no engine serves now, in a few words; None: at least one does."""
        troubles = [each.trouble() for each in self._engines.values()]
        return None if None in troubles else troubles[0] if troubles else "no engine is known"

    def overdue_seconds(self) -> float:
        """Seconds since all engines should have been killed and replaced; below 0 one is not overdue."""
        return min((each.overdue_seconds() for each in self._engines.values()), default=-math.inf)

    def health(self) -> EngineHealth:
        healths = [each.health() for each in self._engines.values()]
        return EngineHealth(
            alive=any(each.alive for each in healths),
            step_id=max((each.step_id for each in healths), default=0),
            has_work=bool(self._streams),
        )

    def rows(self) -> list[ReplicaRow]:
        """All replicas, for operators."""
        return [
            ReplicaRow(
                name=each.name,
                state=each.engine.state.value,
                draining=each.is_draining,
                streams=len(each.streams),
                prompt_tokens_ahead=each.tokens_ahead,
                restarts=each.engine.restarts,
                numerics=each.numerics,
                pid=each.engine.pid,
                why=each.engine.why,
            )
            for each in self._replicas.values()
        ]

    def wanted(self) -> Wanted:
        """The replicas that the work of the last minute asks for: a signal for whatever starts and ends them."""
        ready = sum(each.state is EngineState.READY for each in self._engines.values())
        return self._router.wanted(self._clock(), ready=ready)

    # ---------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> None:
        stream = self._streams[request.request_id] = Stream(request=request)
        self._place(stream, JournalEntry(request))

    def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            if stream.replica is not None:
                stream.replica.engine.abort(stream.run_id)
            self._forget(stream)

    def hold_request(self, request_id: str) -> None:
        self._set_held(request_id, is_held=True)

    def release_request(self, request_id: str) -> None:
        self._set_held(request_id, is_held=False)

    def _set_held(self, request_id: str, *, is_held: bool) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.entry is not None:
            stream.entry.held = is_held
        elif stream.replica is not None:
            engine = stream.replica.engine
            (engine.hold_request if is_held else engine.release_request)(stream.run_id)

    def _place(self, stream: Stream, entry: JournalEntry) -> None:
        """Give a request to the replica that the policy chooses, or let it wait for one."""
        entry.request = stream.request
        route = self._choose(stream, entry)
        if route is None:
            stream.entry = entry
            if self._stopped or self._are_dead():
                self._fail(stream, "the engine is not running")
            elif stream.timer is None:
                stream.timer = AwakeTimer(self._failover_seconds, partial(self._give_up, stream))
            return
        if stream.timer is not None:
            stream.timer.cancel()
        stream.entry = stream.timer = None
        target = stream.replica = self._replicas[route.name]
        target.streams[stream.request.request_id] = stream
        others = [each for each in self._replicas.values() if each is not target]
        source = self.sources.choose(entry, route, stream.blocks or (), target, others)
        stream.unanswered = _expected_tokens(entry, source, target.plan)
        target.tokens_ahead += stream.unanswered
        request = self._router.sent(stream.request, route, stream.blocks or (), self._clock())
        entry.request = replace(request, request_id=stream.run_id, kv_source=source)
        taken = RouteTaken(
            replica=route.name,
            reason="moved" if stream.epoch else "cached" if route.hit_blocks else "load",
            why=route.why,
            predicted=route.predicted_ttft,
            sent_at=self._clock(),
        )
        stream.routes.append(taken)
        log.debug("request %s goes to %s", stream.request.request_id, taken)
        self.on_route(taken.reason)
        target.engine.adopt(entry)

    def _choose(self, stream: Stream, entry: JournalEntry) -> Route | None:
        standings = self._standings()
        if stream.blocks is None and standings:  # hashed once, however often it moves
            size, lends = standings[0].limits.block_size, any(each.lends for each in self._replicas.values())
            stream.blocks = self._router.blocks_of(stream.request, size, lends=lends)
        cohort, blocks = stream.numerics if entry.has_tokens else "", stream.blocks or ()
        name = stream.request.request_id
        return self._router.choose(entry, name, cohort, standings, now=self._clock(), blocks=blocks)

    def _standings(self) -> list[Standing]:
        """The replicas as a policy sees them. One that looks for a culprit gets nothing while another is there."""
        replicas = [each for each in self._replicas.values() if each.engine.plan is not None]
        ready = [each for each in replicas if each.engine.state is EngineState.READY and not each.is_draining]
        sound = [each for each in ready if not each.engine.is_proving] or ready
        sound = [each for each in sound if not each.is_for_prompts] or sound
        return [
            Standing(
                name=each.name,
                cohort=each.numerics,
                state="ready" if each in sound else "draining" if each.is_draining else "silent",
                limits=each.engine.plan.scheduler.limits,
                tokens_ahead=each.tokens_ahead + each.engine.elsewhere[0],
                requests=len(each.streams) + each.engine.elsewhere[1],
                stats=self._sums.of(each.name),
            )
            for each in replicas
            if each.engine.plan is not None
        ]

    def _are_dead(self) -> bool:
        return all(each.state is EngineState.DEAD for each in self._engines.values())

    def _leave(self, stream: Stream) -> None:
        """No replica has the request any more."""
        if stream.replica is not None:
            stream.replica.streams.pop(stream.request.request_id, None)
            stream.replica.tokens_ahead -= stream.unanswered
            stream.unanswered, stream.replica = 0, None
            self._router.forget(stream.request.request_id)
            self.sources.withdraw(stream.request.request_id)

    def _forget(self, stream: Stream) -> None:
        """The request has ended."""
        request_id = stream.request.request_id
        if stream.replica is not None:
            self._ended[request_id] = _Ended(stream.replica.name, stream.run_id, stream.routes)
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        self._leave(stream)
        if stream.timer is not None:
            stream.timer.cancel()
        self._streams.pop(request_id, None)

    def _fail(self, stream: Stream, message: str, *, code: str = "", culprit: bool = False) -> None:
        entry = stream.entry or JournalEntry(stream.request)
        entry.request = stream.request
        self._forget(stream)
        outputs = entry.failure(message, code=code, culprit=culprit)
        self.on_step(StepOutput(step_id=0, outputs=outputs, stats=EngineStats()))

    def _give_up(self, stream: Stream) -> None:
        log.error("a request has waited %g s for an engine: it is given up", self._failover_seconds)
        self._fail(stream, "its replica was lost, and no other one can go on with it", code=ReplicaLost.default_code)

    # ---------------------------------------------------------------- outputs

    def _deliver(self, source: Replica, step: StepOutput) -> None:
        """Pass a step's outputs on, under the clients' ids; outputs of an earlier epoch are dropped."""
        outputs = tuple(each for output in step.outputs if (each := self._own(source, output)) is not None)
        for output in outputs:
            stream = None if output.finish is None else self._streams.get(output.request_id)
            if stream is not None and not source.engine.has(stream.run_id):
                self._forget(stream)
        self._router.observe(source.name, step)
        self.sources.told(source.name, step.stats)
        stats = self._sums.take(source.name, step.stats) if step.stats.blocks_total else EngineStats()
        self.on_step(StepOutput(step_id=step.step_id, outputs=outputs, stats=stats))

    def _own(self, source: Replica, output: TokenOutput) -> TokenOutput | None:
        """The output with the client's id; None if it is not from the engine that has the request now."""
        request_id = output.request_id.partition(EPOCH)[0]
        stream = self._streams.get(request_id)
        if stream is None or stream.replica is not source or stream.run_id != output.request_id:
            if output.finish is not None:
                self.sources.ends(output.request_id)
            return None
        if stream.unanswered and output.progress is None:
            source.tokens_ahead -= stream.unanswered
            stream.unanswered = 0
            self._router.answered(request_id, self._clock())
            self._note_first(stream, self._clock())
            self.sources.withdraw(request_id)
        stream.numerics, stream.num_silent = source.numerics, 0
        if stream.moved_at is not None:
            self.on_moved(self._clock() - stream.moved_at)
            stream.moved_at = None
        return output if output.request_id == request_id else replace(output, request_id=request_id)

    def _note_first(self, stream: Stream, now: float) -> None:
        """The first output from where it was sent has come; a line where that is late, but not for each of many."""
        route = stream.routes[-1]
        route.seen = now - route.sent_at
        if route.is_slow and now >= self._told_slow + _SLOW_LINE_SECONDS:
            self._told_slow = now
            log.info(
                "request %s had its first output after %.1f s from %s", stream.request.request_id, route.seen, route
            )

    # ---------------------------------------------------------------- moves

    def _lost(self, source: Replica) -> None:
        """A replica has no engine for now, or for good: others go on with its streams.

        Requests under suspicion stay: the replica's next engine gets them one at a time, so that no other engine, with
        all that it runs, pays for the proof. They move only where that engine does not come.
        """
        if self._stopped:
            return
        is_away = source.engine.state is EngineState.LOST  # the engine may still run, and its totals go on
        stats = self._sums.away(source.name) if is_away else self._sums.lost(source.name)
        (self._router.is_away if is_away else self._router.joins)(source.name)
        is_dead = source.engine.state is EngineState.DEAD
        self.sources.lost(source)
        self._move(source, source.engine.surrender(suspects=is_dead))
        self.on_step(StepOutput(step_id=0, outputs=(), stats=stats))
        if not is_dead:
            AwakeTimer(self._failover_seconds, partial(self._overdue, source))
        elif self._are_dead():
            for stream in list(self._streams.values()):
                self._fail(stream, "the engine could not be restarted")
            if not self.dead.done():
                self.dead.set_result(None)

    def _overdue(self, source: Replica) -> None:
        """The replica's next engine should be there; if it is not, others take what waits for it."""
        if not self._stopped and source.engine.state is EngineState.RESTARTING:
            self._move(source, source.engine.surrender(suspects=True))

    def _ready(self, arrived: Replica) -> None:
        """A replica has an engine again: streams that wait for one get it, the oldest first."""
        if arrived.engine.plan is not None:
            log.info("replica %s is ready again", arrived.name)
        waiting = [stream for stream in self._streams.values() if stream.entry is not None]
        for stream in sorted(waiting, key=_age):
            if stream.entry is not None:
                self._place(stream, stream.entry)
        for each in self._replicas.values():
            if each.is_draining:
                self._empty(each)

    def _move(self, source: Replica, entries: Iterable[JournalEntry]) -> None:
        """Give requests that a replica has given up to others, the oldest first."""
        found = [(self._streams.get(entry.request.request_id.partition(EPOCH)[0]), entry) for entry in entries]
        moving = sorted(
            ((stream, entry) for stream, entry in found if stream is not None), key=lambda pair: _age(pair[0])
        )
        if moving:
            log.warning("%d streams of replica %s go on with others", len(moving), source.name)
        now = self._clock()
        for stream, entry in moving:
            self._leave(stream)
            stream.epoch += 1
            stream.num_silent += source.engine.state is EngineState.LOST
            if (entry.is_suspected and entry.strikes >= MOST_LOSSES) or stream.num_silent >= MOST_SILENT:
                self.quarantine.add(stream.request, time.monotonic())
                stream.entry = entry
                self._fail(stream, "engines were lost with this request; it will not be tried again", culprit=True)
                continue
            if stream.numerics and not entry.held:  # without output yet, its wait is in its TTFT
                stream.moved_at = stream.moved_at or now
            self.on_move()
            self._place(stream, entry)

    def _empty(self, source: Replica) -> None:
        """Move the streams of a replica that drains, as long as another one can take them."""
        for stream in sorted(source.streams.values(), key=_age):
            probe = JournalEntry(stream.request)
            if stream.numerics:
                probe.finished = {0}  # has output: it stays in its cohort
            if self._choose(stream, probe) is None:
                continue
            entry = source.engine.take(stream.run_id)
            if entry is not None:
                self._move(source, [entry])

    # ---------------------------------------------------------------- operators

    def drain(self, name: str, *, draining: bool) -> ReplicaRow | None:
        """Let a replica take nothing new, and others go on with its streams; or undo that. None: there is none."""
        found = self._replicas.get(name)
        if found is None:
            return None
        found.draining = draining
        if draining:
            self._empty(found)
        else:
            self._ready(found)
        return next(row for row in self.rows() if row.name == name)

    async def control(self, what: str, argument: str = "{}") -> bytes:
        """The sum of an order's effects on all engines that run. Raises as `Supervisor.control` does, if any does."""
        names = [name for name, each in self._engines.items() if each.state is EngineState.READY]
        return await self._questions.control(names, what, argument)

    def _find(self, request_id: str) -> tuple[str, str] | None:
        """The replica that has the request, or had it last, and the request's id there."""
        stream = self._streams.get(request_id)
        if stream is None or stream.replica is None:
            ended = self._ended.get(request_id)
            return None if ended is None else (ended.replica, ended.run_id)
        return stream.replica.name, stream.run_id

    def routes(self, request_id: str) -> Sequence[RouteTaken]:
        """The replicas that got a request, live or one of the last ended ones, in order."""
        stream = self._streams.get(request_id)
        if stream is not None:
            return stream.routes
        ended = self._ended.get(request_id)
        return () if ended is None else ended.routes


def _expected_tokens(entry: JournalEntry, source: KVSource | None, plan: EnginePlan | None) -> int:
    """Tokens before the next one that the request's own replica is expected to compute.

    A block is left of a prompt that another replica computes.
    """
    known = num_known_tokens(entry)
    if source is None or not source.is_computing or plan is None:
        return known
    return min(known, plan.scheduler.limits.block_size)


def _age(stream: Stream) -> float:
    return stream.request.arrival_time
