"""All API servers of a main process: they are started, watched, told what holds, and ended.

Promises: one that ends or falls silent is replaced, and the others go on; what an operator has ordered holds everywhere
before the reply says so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from starlette.types import ASGIApp

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import StepOutput
from quire_engine.own_pauses import OwnPauses
from quire_server.api_servers.frames import KnownKeys, MainState, Start
from quire_server.api_servers.process import ApiServerProcess
from quire_server.api_servers.session import Session
from quire_server.background import begin
from quire_server.engine.engines import Engines
from quire_server.http.credentials import Credentials
from quire_server.settings import ServerLimits, Settings
from quire_server.settings.keys import TenantEntry
from quire_server.state import ServerState

COUNT_SECONDS = 0.5  # between two times that an API server tells what it has counted
_SETTLE_SECONDS = 1.0  # the longest wait for all to have taken in what holds
_LONGEST_PAUSE = 5.0  # seconds before one that ends again and again is started again
_STEADY_SECONDS = 30.0  # after so long the pauses begin anew

log = logging.getLogger("quire.api-servers")


class ApiServers:
    """The API servers of one main process."""

    def __init__(
        self,
        settings: Settings,
        credentials: Credentials,
        app: ASGIApp,
        sockets: Sequence[socket.socket],
    ) -> None:
        """`sockets`: a listening one for each; `app`: answers what they pass on."""
        self.restarts = 0
        self._settings, self._credentials, self._app = settings, credentials, app
        self._sockets = tuple(sockets)
        self._sessions: dict[int, Session] = {}  # of those that run, by number
        self._processes: dict[int, ApiServerProcess] = {}
        self._state: ServerState | None = None
        self._plan: EnginePlan | None = None
        self._certificates = 0
        self._is_ending = False
        self._asked: set[asyncio.Task[None]] = set()
        self._tasks = [
            begin(partial(self._keep, number), f"api-server-{number}") for number in range(len(self._sockets))
        ]
        self._tasks.append(begin(self._watch, "api-servers-watch"))
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> list[int]:
        """Process ids, by number."""
        return [self._processes[number].pid for number in sorted(self._processes)]

    async def listen(self) -> None:
        """Wait until the first one accepts connections."""
        await self._first

    def open(self, state: ServerState, engines: Engines) -> None:
        """The engine is ready: requests of all API servers go to its queue."""
        self._state, self._plan = state, state.client.plan
        deliver = engines.on_step

        def delivered(step: StepOutput) -> None:
            deliver(step)
            for session in self._sessions.values():
                session.flush()

        engines.on_step = delivered
        self._credentials.on_reloaded = self._reloaded
        state.settle = self.settle
        for session in self._sessions.values():
            session.serve(state)
        self.tell()

    def tell(self) -> None:
        """Tell all what holds now."""
        now = self._now()
        for session in self._sessions.values():
            session.tell(now)

    async def settle(self) -> None:
        """Tell all what holds, and wait until they have taken it in and what they have counted is here."""
        self.tell()
        await self.order("count", _SETTLE_SECONDS)

    async def order(self, what: str, seconds: float | None = None) -> None:
        """Have something done by all; waits for so long."""
        asked = [asyncio.create_task(each.order(what)) for each in self._sessions.values()]
        if asked:
            await asyncio.wait(asked, timeout=seconds)
        for task in asked:
            task.cancel()

    async def close(self, seconds: float) -> None:
        """End all API servers; each may take so long for what its clients have not received."""
        self._is_ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        orders = [asyncio.create_task(each.order("close")) for each in self._sessions.values()]
        await asyncio.gather(*(each.end(seconds) for each in self._processes.values()))
        for task in orders:
            task.cancel()
        await asyncio.gather(*orders, return_exceptions=True)
        for session in self._sessions.values():
            session.close()
        for each in self._sockets:
            each.close()

    # ---------------------------------------------------------------- each one

    async def _keep(self, number: int) -> None:
        """Start one, and another whenever it has ended."""
        pause = 0.0
        while True:
            began = time.monotonic()
            try:
                await self._run(number)
            except OSError as error:
                log.error("API server %d cannot be started: %s", number, error.strerror or error)
            self.restarts += 1
            if self._state is not None:
                self._state.metrics.api_server_restarted()
            pause = 0.0 if time.monotonic() > began + _STEADY_SECONDS else min(2 * pause or 0.1, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _run(self, number: int) -> None:
        session = Session(self._app)
        process = ApiServerProcess(session, self._sockets[number])
        self._processes[number] = process
        try:
            await process.begin(
                Start(
                    settings=of_each(self._settings, len(self._sockets)).model_dump_json(),
                    limits=limits_of_each(ServerLimits(), len(self._sockets)),
                    listening=self._sockets[number].fileno(),
                    count=len(self._sockets),
                )
            )
            self._sessions[number] = session
            if self._state is not None:
                session.serve(self._state)
            session.tell(self._now())
            session.accepts.add_done_callback(self._accepts)
            await asyncio.wait([session.link.lost])
        finally:
            if not self._is_ending:
                del self._processes[number]
                self._sessions.pop(number, None)
                ending = await process.end()
                log.error("API server %d %s with %d unfinished requests: %s; another one is started",
                          number, ending, session.num_live, session.link.why_lost)  # fmt: skip
                session.close()

    def _accepts(self, accepts: asyncio.Future[None]) -> None:
        if not accepts.cancelled() and not self._first.done():
            self._first.set_result(None)

    async def _watch(self) -> None:
        """Ask each for what it has counted; one that does not answer is killed."""
        pauses = OwnPauses(COUNT_SECONDS)
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            self._ask_each(pauses)

    def _ask_each(self, pauses: OwnPauses) -> None:
        pauses.look()
        for session in list(self._sessions.values()):
            silence = pauses.silence(session.link.heard)
            if session.accepts.done() and silence > self._settings.engine_hang_timeout:
                session.link.abort(f"no sign of life for {silence:.1f} s")
            elif not session.is_counting:
                asked = asyncio.create_task(session.order("count"))
                self._asked.add(asked)
                asked.add_done_callback(self._asked.discard)

    # ---------------------------------------------------------------- what holds

    def _now(self) -> MainState:
        state, known = self._state, self._credentials.known
        keys = KnownKeys(
            api={digest.hex(): name for digest, name in known.api.items()},
            tenants=told_tenants(known.tenants),
            certificates=self._certificates,
        )
        if state is None:
            return MainState(plan=None, draining=False, stopping=False, adapters=(), keys=keys)
        return MainState(
            plan=self._plan,
            draining=state.draining,
            stopping=state.stopping,
            adapters=state.adapters.served(),
            keys=keys,
        )

    def _reloaded(self) -> None:
        self._certificates += 1
        self.tell()


def told_tenants(tenants: Iterable[TenantEntry]) -> tuple[str, ...]:
    """Each tenant as JSON of what its entry has said: defaults are not all values that an entry may have."""
    return tuple(entry.model_dump_json(by_alias=True, exclude_defaults=True) for entry in tenants)


def of_each(settings: Settings, count: int) -> Settings:
    """The settings of each of `count` API servers, among which connections are divided. Adapters come over the link."""
    return settings.model_copy(
        update={
            "max_connections": -(-settings.max_connections // count),
            "lora_modules": (),
            "batch_dir": None,  # batches are the main process's
        }
    )


def limits_of_each(limits: ServerLimits, count: int) -> ServerLimits:
    """The limits of each, among which the memory that is held for clients is divided."""
    return replace(
        limits,
        max_body_bytes_total=limits.max_body_bytes_total // count,
        max_text_bytes_queued=limits.max_text_bytes_queued // count,
        max_reply_bytes_waiting=limits.max_reply_bytes_waiting // count,
    )
