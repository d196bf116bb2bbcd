"""Starts, watches and restarts the engine process; an `EnginePort` for the rest of the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from quire_engine.contract.config import EngineConfig, faults_of_start
from quire_engine.contract.errors import ConfigError, CrashLoop, EngineDead, ModelLoadError
from quire_engine.contract.plan import EnginePlan, for_later_engines
from quire_engine.contract.types import EngineHealth, EngineStats, GenerationRequest, StepOutput
from quire_engine.own_modules import module_command
from quire_engine.process.transport import Abort, Control, Hold, Inspect, LoadProgress, Release, Shutdown
from quire_server.engine.kv_events.events import CacheListener
from quire_server.engine.memory_files import PoolMemory, WeightsMemory
from quire_server.engine.process import EngineProcess
from quire_server.engine.recovery import JournalEntry, Loss, Quarantine, Recovery, fingerprint
from quire_server.engine.restart_policy import HangLimit, RestartBudget, RestartPolicy

ANSWER_SECONDS = 10.0  # most seconds to answer a question, which waits for the end of the running step
_QUIET_SECONDS = 2.5  # an idle engine sends a heartbeat every second
_UNREADY = 0.4  # share of the hang limit after which the server is not ready for requests

FILES_CHANGED = "the model's files changed on disk since the start"

log = logging.getLogger("quire.supervisor")


class Supervisor:
    """One engine process after another, behind `EnginePort`.

    A crash or hang of the engine is a pause for clients, with identical tokens afterwards.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: RestartPolicy | None = None,
        *,
        program: Sequence[str] = tuple(module_command("quire_engine.process")),
        stderr: int | None = None,
        cpus: Sequence[int] = (),
        weights: WeightsMemory | None = None,
        quarantine: Quarantine | None = None,
        listener: CacheListener | None = None,
        spare: Spare | None = None,
    ) -> None:
        """`cpus`: hardware threads of its engines; empty: all. `weights`, `quarantine`, `spare`: shared with others.

        `listener`: learns of the engines' caches, and ends with them.
        """
        self.on_step: Callable[[StepOutput], None] = lambda _: None
        self.on_restart: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None  # called when an engine has replaced another
        # Called when requests are left without an engine: in the state RESTARTING, or DEAD where none will come. Who
        # is called may take them by `surrender`.
        self.on_lost: Callable[[], None] = lambda: None
        self.state = EngineState.STARTING
        self.restarts = 0
        self.plan: EnginePlan | None = None  # of the latest engine
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.quarantine = Quarantine() if quarantine is None else quarantine
        self._config = config
        self._checkpoint = ""
        self._listener = listener
        self._policy = policy or RestartPolicy()
        self._hang = HangLimit(self._policy)
        self._budget = RestartBudget(self._policy)
        self._program = tuple(program)
        self._stderr = stderr  # descriptor for engine processes; None: the server's own
        self._process: EngineProcess | None = None  # the latest one, which may have ended
        self._cpus = tuple(cpus)
        # Shared by all engine processes, so that a restart needs no load.
        self._weights = WeightsMemory() if weights is None else weights
        self._pool = PoolMemory()  # so that what an engine had computed is there for the next one
        self._spare = Spare(self._new_process, self._policy.spare_seconds) if spare is None else spare
        self._starts = 0
        self._recovery = Recovery()
        self._watch: asyncio.Task[None] | None = None
        if config.faults:
            points = ", ".join(fault.point for fault in config.faults)
            log.warning("FAULTS ARE INJECTED (%s): this server is for tests and will fail on purpose", points)

    def submit(self, request: GenerationRequest) -> None:
        self.adopt(JournalEntry(request))

    def adopt(self, entry: JournalEntry) -> None:
        """Take over a request with the tokens that others have delivered."""
        process = self._receiver()
        can_go = not (self._recovery.has_suspects or entry.is_suspected or entry.held)
        if process is not None and can_go:
            self._recovery.admit(entry)
            process.send(entry.resumed_request())
        elif self.state in (EngineState.STOPPED, EngineState.DEAD):
            self._fail(entry, "the engine is not running")
        else:
            self._recovery.enqueue(entry)
            self._send_waiting()

    def has(self, request_id: str) -> bool:
        """Whether the request is live here."""
        return request_id in self._recovery

    def take(self, request_id: str) -> JournalEntry | None:
        """`Recovery.hand_over`; the engine ends it."""
        entry = self._recovery.hand_over(request_id)
        if entry is not None:
            self._tell(Abort(request_id=request_id), is_due=entry.leave_engine())
        return entry

    def surrender(self, *, suspects: bool) -> list[JournalEntry]:
        """Give up the requests that no engine has, for other engines; `suspects`: those under suspicion too."""
        return self._recovery.surrender(suspects=suspects)

    @property
    def is_proving(self) -> bool:
        """Whether new requests wait here, until the engine has answered a probe and suspects one by one."""
        return self._recovery.has_suspects

    def abort(self, request_id: str) -> None:
        self._tell(Abort(request_id=request_id), is_due=self._recovery.forget(request_id))

    def hold_request(self, request_id: str) -> None:
        self._tell(Hold(request_id=request_id), is_due=self._recovery.hold(request_id))

    def release_request(self, request_id: str) -> None:
        self._tell(Release(request_id=request_id), is_due=self._recovery.release(request_id))

    def _tell(self, frame: Abort | Hold | Release, *, is_due: bool) -> None:
        if is_due and self._process is not None:
            self._process.send(frame)
        self._send_waiting()

    def health(self) -> EngineHealth:
        process = self._receiver()
        if process is None:
            return EngineHealth(alive=False, step_id=0, has_work=len(self._recovery) > 0)
        return process.health

    async def inspect(self, what: str, argument: str = "{}") -> bytes:
        """An answer about the engine's state, JSON. Raises Unanswerable; another QuireError if no engine answers."""
        return await self._answer(Inspect, what, argument)

    async def control(self, what: str, argument: str = "{}") -> bytes:
        """The effect of an operator's order, JSON. Raises as `inspect` does."""
        return await self._answer(Control, what, argument)

    async def _answer(self, kind: type[Inspect | Control], what: str, argument: str) -> bytes:
        process = self._receiver()
        if process is None:
            raise EngineDead("no engine is there to be asked")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await process.ask(kind, what, argument)
        except TimeoutError:
            raise EngineDead(f"the engine has not answered for {ANSWER_SECONDS:g} s; a step runs") from None

    # ---------------------------------------------------------------- life

    @property
    def num_replicas(self) -> int:
        return 1

    @property
    def is_draining(self) -> bool:
        return False

    @property
    def why(self) -> str:
        return self.trouble() or ""

    @property
    def elsewhere(self) -> tuple[int, int]:
        return 0, 0

    def whole_plan(self, plan: EnginePlan) -> EnginePlan:
        """The plan of all engines together: this one's."""
        return plan

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return self._process.pid if self._process is not None else None

    @property
    def progress(self) -> LoadProgress | None:
        """The progress of the latest engine's start, as last reported."""
        return self._process.progress if self._process is not None else None

    def load_ratio(self) -> float:
        """The progress of the load, 0 to 1; 1 once the engine is ready."""
        if self.state is EngineState.READY:
            return 1.0
        return 0.0 if self.progress is None else self.progress.ratio

    @property
    def _is_stopped(self) -> bool:
        return self.state is EngineState.STOPPED

    def trouble(self) -> str | None:
        """Why no engine serves now, in a few words; None: one does."""
        return "engine stuck" if self.is_stuck else _TROUBLE[self.state]

    def overdue_seconds(self) -> float:
        """Seconds since the engine should have been killed and replaced; below 0 it is not overdue."""
        return self.stuck_seconds() - self.hang_seconds

    def stuck_seconds(self) -> float:
        """0 while the engine sends frames or is not ready; else the seconds since its last frame."""
        if self.state is not EngineState.READY or self._process is None:
            return 0.0
        silence = self._process.silence
        return silence if silence > _QUIET_SECONDS else 0.0

    @property
    def hang_seconds(self) -> float:
        """Seconds of silence after which the engine is killed and replaced."""
        return self._hang.seconds

    @property
    def is_stuck(self) -> bool:
        """Whether the engine has been silent for so long that a load balancer should send requests elsewhere."""
        return self.stuck_seconds() > _UNREADY * self.hang_seconds

    async def start(self) -> EnginePlan:
        """Start the first engine. Raises ConfigError or ModelLoadError as the engine does.

        If it crashes or hangs it is started again. Raises CrashLoop if that happens too often, EngineDead if no process
        can be launched or `stop` was called.
        """
        process, plan = await self._first_start()
        if self.state is EngineState.STOPPED:
            await process.reap(grace_seconds=0.0)
            raise EngineDead("the engine was stopped while it started")
        if self._checkpoint and plan.identity.checkpoint != self._checkpoint:
            await process.reap(grace_seconds=0.0)
            raise ModelLoadError(FILES_CHANGED)
        self._checkpoint = plan.identity.checkpoint
        self.plan = plan
        self._config = for_later_engines(self._config, plan)
        self._hang.expect(plan)
        if self._listener is not None:
            self._listener.begins(plan)
        self.state = EngineState.READY
        self._watch = asyncio.create_task(self._supervise(process), name="engine-supervisor")
        self._spare.prepare()
        self._send_waiting()
        return plan

    async def stop(self) -> None:
        """End the engine process; unfinished requests end with an error. Idempotent."""
        if self.state is not EngineState.DEAD:
            self.state = EngineState.STOPPED
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self._spare.close()
        if self._process is not None:
            self._process.send(Shutdown())
            await self._process.reap(grace_seconds=2.0)
        self._weights.close()
        self._pool.close()
        if self._listener is not None:
            self._listener.close()
        for entry in self._recovery.dismiss():
            self._fail(entry, "the server is shutting down")

    def _new_process(self) -> EngineProcess:
        return EngineProcess(self._program, self._deliver, stderr=self._stderr, cpus=self._cpus)

    async def _launch(self) -> tuple[EngineProcess, EnginePlan]:
        process = self._process = self._spare.take() or self._new_process()
        process.on_step = self._deliver
        self._starts += 1
        config = replace(self._config, faults=faults_of_start(self._config.faults, self._starts))
        weights = self._weights.for_next_engine()
        memory = weights, None if weights is None else self._pool.for_next_engine()
        return process, await process.start(config, self._policy.start_seconds, memory=memory)

    async def _first_start(self) -> tuple[EngineProcess, EnginePlan]:
        while True:
            try:
                return await self._launch()
            except EngineDead as error:
                if self._starts == 0 or self._is_stopped:
                    raise
                failure = error
            self._budget.start_failed(time.monotonic())
            pause = self._budget.pause(time.monotonic())
            if pause is None:
                raise CrashLoop(f"{failure}; {self._budget}, which is as often as it may") from None
            log.error("%s; it is started again", failure)
            await asyncio.sleep(pause)
            if self._is_stopped:
                raise failure

    async def _supervise(self, process: EngineProcess | None) -> None:
        """Watch the engine; when it ends, start another, until it has failed too often."""
        try:
            while process is not None:
                await process.wait_for_end(lambda: self._hang.seconds, self._policy.absent_seconds)
                self.state = EngineState.RESTARTING
                await process.reap(grace_seconds=1.0)
                loss = self._account_for(process)
                if self._listener is not None:
                    self._listener.ends()
                self.on_lost()
                process = await self._restart(loss)
        except Exception:  # a bug: without supervision the server would wait for ever
            log.exception("the supervision of the engine failed")
            self._give_up("the engine is no longer watched")

    def _account_for(self, process: EngineProcess) -> Loss:
        """Blame requests, or the engine itself, for a process that has ended; returns how it did.

        A crash that a request has caused is not a failure of the engine, and neither are the earlier crashes that led
        to the proof: clients that send such requests must not use up the restart budget.
        """
        log.error("the engine process %s with %d live requests; restarting", process.ending, len(self._recovery))
        now, loss = time.monotonic(), Loss.CRASH
        if process.ended_by_others:
            loss = Loss.KILL
        elif process.end_is_doubtful:
            loss = Loss.DOUBTFUL
        if loss is not Loss.KILL:
            self._pool.distrust()
        guilty = self._recovery.crashed(loss, now=now)
        for entry in guilty:
            self._budget.forgive(entry.crashes)
            self._condemn(entry, now)
        if not guilty and (loss is Loss.CRASH or not process.progressed):
            self._budget.engine_failed(now)
        return loss

    def _condemn(self, guilty: JournalEntry, now: float) -> None:
        """Quarantine a culprit; equal requests that wait end with its error, since each would crash the engine too."""
        key = self.quarantine.add(guilty.request, now)
        log.error("a request has taken the engine down; its like is refused for a while (%s)", key.hex()[:12])
        alike = self._recovery.drop(lambda entry: not entry.has_tokens and fingerprint(entry.request) == key)
        for entry in [guilty, *alike]:
            self._fail(entry, "this request has taken the engine down; it will not be tried again", culprit=True)

    async def _restart(self, loss: Loss) -> EngineProcess | None:
        """Start engines until one is ready, and replay the live requests. None: given up.

        After a kill by others nothing speaks against engine or requests: the requests go on without a probe, which
        would take a step of its own.
        """
        while (pause := self._budget.pause(time.monotonic())) is not None:
            await asyncio.sleep(pause)
            self.restarts += 1
            self.on_restart()
            try:
                process, plan = await self._launch()
            except (EngineDead, ConfigError, ModelLoadError) as error:
                log.error("restart failed: %s", error)
                self._budget.start_failed(time.monotonic())
                continue
            self._budget.started()
            if plan.identity.checkpoint != self._checkpoint:
                # Resuming on other weights would splice two models into one answer.
                self._give_up(FILES_CHANGED)
                return None
            self.plan = plan
            if self._listener is not None:
                self._listener.begins(plan)
            self.state = EngineState.READY
            counts = len(self._recovery), plan.pool.blocks_taken_over
            log.info("the engine is ready again; resuming %d requests; %d KV blocks are taken over", *counts)
            if loss is Loss.KILL:
                self._send_waiting()
            else:
                process.send(self._recovery.prove())
            self._spare.prepare()
            self.on_ready()
            return process
        self._give_up(str(self._budget))
        return None

    def _give_up(self, reason: str) -> None:
        self.state = EngineState.DEAD
        log.critical("%s; giving up", reason)
        self.on_lost()
        for entry in self._recovery.dismiss():
            self._fail(entry, "the engine could not be restarted")
        if not self.dead.done():
            self.dead.set_result(None)

    # ---------------------------------------------------------------- requests and tokens

    def _deliver(self, step: StepOutput) -> None:
        """Pass a step's outputs on. An error in the receiver is logged and does not count as the engine's."""
        step = self._recovery.record(step)
        if step.cache_events and self._listener is not None:
            self._listener.changes(step.cache_events)
        if step.stats.step_seconds > self._hang.longest_step:
            self._hang.learn(step.stats)
        try:
            self.on_step(step)
        except Exception:
            log.exception("what step %d computed could not be delivered in full", step.step_id)
        if self._recovery.culprits:
            while self._recovery.culprits:
                self.quarantine.add(self._recovery.culprits.pop(), time.monotonic())
        if self._recovery.waiting:
            self._send_waiting()

    def _send_waiting(self) -> None:
        process = self._receiver()
        while process is not None and (request := self._recovery.next_request()) is not None:
            process.send(request)

    def _receiver(self) -> EngineProcess | None:
        """The process that takes requests now; None while there is none, or while its end is being handled."""
        process = self._process
        return process if self.state is EngineState.READY and process is not None and process.connected else None

    def _fail(self, entry: JournalEntry, message: str, *, culprit: bool = False) -> None:
        """Deliver the error outputs of a request that no engine will finish."""
        outputs = entry.failure(message, culprit=culprit)
        self.on_step(StepOutput(step_id=0, outputs=outputs, stats=EngineStats()))


class EngineState(Enum):
    """The state of the engine as the server sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    ASLEEP = "asleep"  # there is none until requests or an operator want it
    DEAD = "dead"  # given up; the server exits with 70
    LOST = "lost"  # on another machine, which cannot be reached


_TROUBLE = {
    EngineState.STARTING: "engine starting",
    EngineState.READY: None,
    EngineState.RESTARTING: "engine restarting",
    EngineState.STOPPED: "engine stopped",
    EngineState.ASLEEP: "engine asleep",
    EngineState.DEAD: "engine dead",
    EngineState.LOST: "node lost",
}

_LOOK_SECONDS = 1.0  # between two looks at the spare
_MOST_DOUBLINGS = 6


class Spare:
    """The spare process: launched ahead to become the next engine; at most one, for one event loop.

    Importing PyTorch is most of a restart while the weights are still in memory, so it is done ahead. The libraries'
    pages are shared with the engine process: a spare costs the memory of one interpreter and its modules. A spare that
    has ended is replaced, each time after twice as long, and none is left behind.
    """

    def __init__(self, launch: Callable[[], EngineProcess], seconds: float | None) -> None:
        """The spare is launched `seconds` after `prepare`, when the engine's first requests no longer need the cores.

        None: never.
        """
        self._launch = launch
        self._seconds = seconds
        self._process: EngineProcess | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the next launch, or of the next look at the spare
        self._num_lost = 0  # spares that have ended, since one was of use

    def prepare(self) -> None:
        """Schedule the launch of a spare. Idempotent."""
        if self._seconds is not None and self._process is None and self._timer is None:
            seconds = self._seconds * 2 ** min(self._num_lost, _MOST_DOUBLINGS)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._make)

    def take(self) -> EngineProcess | None:
        """Hand the spare over to the caller. None: there is none."""
        self._stop_timer()
        process, self._process = self._process, None
        if process is not None and not process.runs:
            self._lose(process)
            return None
        self._num_lost = 0
        return process

    async def close(self) -> None:
        """End the spare. Idempotent."""
        self._stop_timer()
        process, self._process = self._process, None
        if process is not None:
            process.close()
            await process.reap(grace_seconds=0.0)

    def _make(self) -> None:
        self._timer = None
        try:
            self._process = self._launch()
        except EngineDead as error:
            log.warning("no process waits to be the next engine: %s", error)
        else:
            self._look_later()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._process is None:
            return
        if self._process.runs:
            self._look_later()
            return
        process, self._process = self._process, None
        self._lose(process)
        self.prepare()

    def _lose(self, process: EngineProcess) -> None:
        log.warning("the process that waited to be the next engine %s", process.ending)
        process.close()
        self._num_lost += 1

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
