"""The engines of several models: they start when requests come, and end when others need their memory.

Owns which model has an engine. Promises: loaded and sleeping models fit the budget, also while an engine ends; requests
of a model without an engine wait in their order of arrival and go on with the same tokens; one model's failure is not
another's. Must not know: HTTP, text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from quire_engine.contract.errors import EngineDead, QuireError
from quire_engine.contract.plan import EnginePlan
from quire_engine.process.transport import LoadProgress
from quire_server.engine.models.budget import Resident, room_for
from quire_server.engine.models.sleeping import SleepingSupervisor
from quire_server.engine.supervisor import EngineState
from quire_server.metrics.metric_catalog import ModelEnd, ModelState

PROCESS_BYTES = 256 << 20  # of each process of an engine beside weights and pool: the interpreter and its libraries
FAILED_SECONDS = 30.0  # before requests start an engine again that could not be started
_LOOK_SECONDS = 0.25  # between two looks while nothing happens
_PREPARING_SECONDS = 1.0  # from the choice of a model to its request's place in the queue
_LOAD_GUESS_SECONDS = 3.0  # of a load, and the rate of reading, until one has been measured
_LOAD_GUESS_RATE = 400e6  # bytes per second

Progress = LoadProgress | None  # of a start that is underway

log = logging.getLogger("quire.models")


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How long a model stays in memory, as the operator says."""

    pinned: bool = False
    priority: int = 0
    idle_seconds: float | None = None  # None: until another model needs its memory
    sleep_level: int = 1  # 1: the weights stay in memory; 2: nothing does


class ModelEngine:
    """One model's engine, which may be there or not."""

    def __init__(self, name: str, supervisor: SleepingSupervisor, plan: EnginePlan, residency: Residency) -> None:
        """The engine is asleep, and will be that of the plan."""
        supervisor.expect(plan)
        self.name = name
        self.supervisor = supervisor
        self.residency = residency
        self.on_loaded: Callable[[EnginePlan, float], None] = lambda _plan, _seconds: None
        self.on_ended: Callable[[ModelEnd], None] = lambda _cause: None
        # Instead of the operator's idle seconds, by a request's wish; None: there is none. Infinity: for ever.
        self.keep_seconds: float | None = None
        self.put_away = False  # by an order: it stays without an engine until it is asked for again
        self.ordered = residency.pinned  # it is to be loaded without a request
        self.last_used = self.loaded_at = self.waiting_since = 0.0
        self.move: asyncio.Task[None] | None = None
        self.moves: Literal["", "loading", "unloading"] = ""
        self.failed_at = float("-inf")
        self.why = ""  # it has failed
        self.load_seconds: dict[bool, float] = {}  # of the last load, by whether the weights were in memory
        self._move_began = 0.0
        self._held_before_move: int | None = None
        self._will_keep = False

    @property
    def weights_bytes(self) -> int:
        return self.plan.model.weights_bytes

    @property
    def engine_bytes(self) -> int:
        """Bytes of the pool and the processes, beside the weights, which all ranks map."""
        plan = self.plan
        processes = plan.machine.tensor_parallel_size * PROCESS_BYTES
        return plan.pool.num_bytes + plan.speculation.draft_bytes + plan.adapters.num_bytes + processes

    @property
    def plan(self) -> EnginePlan:
        """The plan of its latest engine, or of the next one."""
        if self.supervisor.plan is None:
            raise AssertionError("an engine that is expected has a plan")
        return self.supervisor.plan

    @property
    def state(self) -> ModelState:
        """The state as clients and operators see it."""
        if self.moves:
            return self.moves
        state = self.supervisor.state
        if state is EngineState.READY:
            return "loaded"
        if state is EngineState.RESTARTING:
            return "restarting"
        if state in {EngineState.DEAD, EngineState.STOPPED}:
            return "failed"
        return "sleeping" if self.supervisor.keeps_weights else "unloaded"

    @property
    def has_engine(self) -> bool:
        return self.supervisor.state in {EngineState.READY, EngineState.RESTARTING} or self.moves == "loading"

    @property
    def memory_bytes(self) -> int:
        """Bytes that it takes now."""
        now = self.resident()
        return now.taken if now.held_now is None else now.held_now

    @property
    def wants_engine(self) -> bool:
        """Whether requests, or an order, wait for its engine to start."""
        if self.supervisor.state is not EngineState.ASLEEP or self.moves:
            return False
        return self.ordered or (self.supervisor.num_live > 0 and not self.put_away)

    @property
    def idle_limit(self) -> float:
        """Seconds without a request after which its engine ends."""
        if self.residency.pinned:
            return float("inf")
        if self.keep_seconds is not None:
            return self.keep_seconds
        given = self.residency.idle_seconds
        return float("inf") if given is None else given

    def resident(self) -> Resident:
        """The model as the budget sees it."""
        is_unloading = self.moves == "unloading"
        return Resident(
            name=self.name,
            weights=self.weights_bytes,
            engine=self.engine_bytes,
            is_loaded=self.has_engine and not is_unloading,
            keeps_weights=self._will_keep if is_unloading else self.supervisor.keeps_weights,
            is_moving=bool(self.moves),
            held_now=self._held_before_move if is_unloading else None,
            is_busy=self.supervisor.num_live > 0,
            pinned=self.residency.pinned,
            priority=self.residency.priority,
            last_used=self.last_used,
            loaded_at=self.loaded_at,
        )

    def begins(self, move: Literal["loading", "unloading"], now: float, *, keeps: bool = False) -> None:
        """A move begins. `keeps`: the weights stay in memory after the engine."""
        self._held_before_move = self.resident().taken
        self._will_keep = keeps
        self._move_began = now
        self.moves = move

    def seconds_until_loaded(self, now: float) -> float:
        """A guess, from the last load, of when it computes; 0: it does."""
        if self.supervisor.state is EngineState.READY and not self.moves:
            return 0.0
        is_kept = self.supervisor.keeps_weights
        guess = self.load_seconds.get(is_kept) or self.load_seconds.get(not is_kept)
        guess = guess or _LOAD_GUESS_SECONDS + self.weights_bytes / _LOAD_GUESS_RATE
        return max(guess - (now - self._move_began), 0.0) if self.moves == "loading" else guess


class ModelSet:
    """Starts and ends the engines of its models. One task runs it; orders of operators come between its turns."""

    def __init__(
        self,
        engines: Sequence[ModelEngine],
        *,
        budget: int,
        turn_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget`: bytes of all models; `turn_seconds`: of a busy model before it makes way."""
        self.engines = {engine.name: engine for engine in engines}
        self.budget = budget
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._changed = asyncio.Event()
        self._moved = asyncio.Event()
        self._stopped = False
        self._wait: dict[str, float] = {}  # until when a turn lasts that a model waits for
        for engine in engines:
            engine.supervisor.on_wanted = partial(self._asked, engine)

    # ---------------------------------------------------------------- questions

    @property
    def progress(self) -> Progress:
        """The progress of the start that is underway."""
        moving = [each for each in self.engines.values() if each.moves == "loading"]
        return moving[0].supervisor.progress if moving else None

    def trouble(self) -> str | None:
        """Why no model can be served, in a few words; None: one can."""
        return "engine dead" if all(each.state == "failed" for each in self.engines.values()) else None

    def trouble_of(self, name: str) -> str | None:
        """Why one model does not compute now, in a few words; None: it does."""
        engine = self.engines[name]
        if engine.state == "loaded":
            return engine.supervisor.trouble()
        return f"model {engine.state}"

    def overdue_seconds(self) -> float:
        """Return the largest `Supervisor.overdue_seconds` of all engines that serve."""
        return max(each.supervisor.overdue_seconds() for each in self.engines.values())

    def seconds_until_loaded(self, name: str) -> float:
        """A guess of when a model computes, with the turns that it waits for; 0: it does."""
        now = self._clock()
        return max(self._wait.get(name, now) - now, 0.0) + self.engines[name].seconds_until_loaded(now)

    def refused_for(self, name: str) -> float | None:
        """Seconds until a model that could not be started is tried again; None: it can be asked."""
        engine = self.engines[name]
        if engine.supervisor.state is not EngineState.DEAD or engine.moves:
            return None
        return max(engine.failed_at + FAILED_SECONDS - self._clock(), 1.0)

    # ---------------------------------------------------------------- orders

    async def load(self, name: str) -> None:
        """Give a model an engine, now or when there is room. Raises QuireError where it cannot be started."""
        engine = self.engines[name]
        engine.put_away, engine.ordered = False, True
        engine.last_used = self._clock()
        if engine.supervisor.state is EngineState.DEAD and not engine.moves:
            self._move(engine, "unloading", self._forgive(engine))
        self._changed.set()
        while engine.state != "loaded":
            await self._any_move_ends()
            if engine.state == "failed":
                raise EngineDead(engine.why)

    async def put_away(self, name: str, *, level: int) -> None:
        """End a model's engine; its requests are held until it is asked for again. Level 2 frees its weights too."""
        engine = self.engines[name]
        if engine.move is not None:
            await asyncio.wait([engine.move])
        engine.put_away, engine.ordered, engine.keep_seconds = True, False, None
        if engine.has_engine:
            await asyncio.wait([self._end(engine, "order", keeps=level == 1)])
        elif level == 2:
            engine.supervisor.forget_weights()
        self._changed.set()

    def keep(self, name: str, seconds: float, *, shortens: bool) -> None:
        """Take a request's wish that a model stays so long after its last use; infinity: for ever.

        Without `shortens` a time that is longer already holds on.
        """
        engine = self.engines[name]
        engine.keep_seconds = seconds if shortens else max(seconds, engine.idle_limit)
        self.used(name)

    def used(self, name: str) -> None:
        """A request has chosen a model."""
        self.engines[name].last_used = self._clock()

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """Start and end engines as requests come and memory allows, until cancelled."""
        while not self._stopped:
            self._changed.clear()
            self._take_turn()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._changed.wait()

    async def stop(self) -> None:
        """End all engines; unfinished requests end with an error. Idempotent."""
        self._stopped = True
        moves = [engine.move for engine in self.engines.values() if engine.move is not None]
        for move in moves:
            move.cancel()
        await asyncio.gather(*moves, return_exceptions=True)
        await asyncio.gather(*(engine.supervisor.stop() for engine in self.engines.values()))
        self._changed.set()

    def _asked(self, engine: ModelEngine) -> None:
        """A request has come that waits for an engine."""
        if not engine.waiting_since:
            engine.waiting_since = self._clock()
        engine.put_away = False
        self._changed.set()

    def _take_turn(self) -> None:
        now = self._clock()
        for engine in self.engines.values():
            self._look_at(engine, now)
        wanted = [engine for engine in self.engines.values() if engine.wants_engine]
        for engine in wanted:
            engine.waiting_since = engine.waiting_since or now
        for engine in sorted(wanted, key=lambda each: (-each.residency.priority, each.waiting_since)):
            if not self._make_way(engine):
                break  # who waits longer is served first

    def _look_at(self, engine: ModelEngine, now: float) -> None:
        if engine.supervisor.num_live:
            engine.last_used = now
        if engine.moves:
            return
        state = engine.supervisor.state
        if state is EngineState.DEAD:
            if engine.failed_at < engine.loaded_at or engine.failed_at == float("-inf"):  # it served until now
                engine.failed_at, engine.why = now, engine.why or "the engine failed too often"
            elif now >= engine.failed_at + FAILED_SECONDS:
                self._move(engine, "unloading", self._forgive(engine))
        elif state is EngineState.READY and not engine.supervisor.num_live:
            # Who has just chosen a model may be preparing its request.
            is_over = now - max(engine.last_used, engine.loaded_at) >= max(engine.idle_limit, _PREPARING_SECONDS)
            if is_over:
                level = 2 if engine.keep_seconds is not None else engine.residency.sleep_level
                self._end(engine, "idle", keeps=level == 1)

    def _make_way(self, engine: ModelEngine) -> bool:
        """Load a model if there is room, or else begin to make some. False: it has to wait."""
        now = self._clock()
        others = [other.resident() for other in self.engines.values() if other is not engine]
        room = room_for(engine.resident(), others, self.budget, now=now, turn=self._turn_seconds)
        self._wait.pop(engine.name, None)
        if room.is_free:
            self._move(engine, "loading", self._load(engine))
            return True
        for name in room.forget:
            if name not in room.sleep and not self.engines[name].has_engine:
                self.engines[name].supervisor.forget_weights()
        for name in room.sleep:
            self._end(self.engines[name], "memory", keeps=name not in room.forget)
        if room.forget and not room.sleep:
            return self._make_way(engine)
        if room.wait is not None:
            self._wait[engine.name] = now + room.wait
        return False

    def _end(self, engine: ModelEngine, cause: ModelEnd, *, keeps: bool) -> asyncio.Task[None]:
        return self._move(engine, "unloading", self._unload(engine, cause, keeps=keeps), keeps=keeps)

    def _move(
        self,
        engine: ModelEngine,
        kind: Literal["loading", "unloading"],
        work: Coroutine[object, object, None],
        *,
        keeps: bool = False,
    ) -> asyncio.Task[None]:
        engine.begins(kind, self._clock(), keeps=keeps)

        async def move() -> None:
            try:
                await work
            finally:
                engine.moves, engine.move = "", None
                self._changed.set()
                self._moved.set()

        engine.move = asyncio.create_task(move(), name=f"model {kind}")
        return engine.move

    async def _any_move_ends(self) -> None:
        """Wait until an engine has started or ended, for a moment at most."""
        self._moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._moved.wait()

    async def _load(self, engine: ModelEngine) -> None:
        was_kept, began = engine.supervisor.keeps_weights, self._clock()
        try:
            plan = await engine.supervisor.wake()
        except Exception as error:
            engine.failed_at, engine.ordered = self._clock(), False
            engine.why = str(error) if isinstance(error, QuireError) else f"a bug: {error!r}"
            log.error("the model %s could not be loaded: %s", engine.name, engine.why)
            return
        now = self._clock()
        seconds = now - began
        engine.loaded_at, engine.last_used, engine.waiting_since, engine.why = now, now, 0.0, ""
        engine.ordered = False
        engine.load_seconds[was_kept] = seconds
        where = "memory" if was_kept else "disk"
        log.info("the model %s is loaded from %s in %.2f s", engine.name, where, seconds)
        engine.on_loaded(plan, seconds)

    async def _unload(self, engine: ModelEngine, cause: ModelEnd, *, keeps: bool) -> None:
        held = engine.supervisor.num_live
        await engine.supervisor.sleep(keeps_weights=keeps)
        if held:
            engine.waiting_since = self._clock()
        engine.on_ended(cause)
        left = "its weights stay in memory" if engine.supervisor.keeps_weights else "nothing of it is in memory"
        log.info("the engine of %s has ended (%s): %s; %d requests are held", engine.name, cause, left, held)

    async def _forgive(self, engine: ModelEngine) -> None:
        """Allow an engine that has failed to be started again."""
        await engine.supervisor.sleep(keeps_weights=False)
        engine.failed_at = float("-inf")
