"""An API server: accepts connections, answers requests for text, and passes all others to the main process.

Promises: until its own application is built it passes everything on; it ends when the main process says so, and at once
when that is gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import TypeAdapter

from quire_engine.contract.plan import EnginePlan
from quire_server.api_servers.forwarding import LocalOrForwarded
from quire_server.api_servers.frames import (
    FROM_API_SERVER,
    FROM_MAIN,
    Done,
    MainState,
    Order,
    Ready,
    Start,
)
from quire_server.api_servers.port import MainProcess, SharedClient, TellingNames
from quire_server.engine.nodes.link import Link
from quire_server.http.credentials import Credentials
from quire_server.http.event_loop import loop_factory
from quire_server.http.listener import Listening, listening_on
from quire_server.http.overload import OpenRequests, ended
from quire_server.http.starting import AppSwitch
from quire_server.logs import writing
from quire_server.settings import ServerLimits, Settings
from quire_server.settings.keys import TenantEntry
from quire_server.state import ServerState

# What is answered here; the rest is for operators, or keeps what later requests ask for.
LOCAL_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/infill"})
_TENANT = TypeAdapter(TenantEntry)

log = logging.getLogger("quire")


def run(fd: int) -> int:
    """Serve with the link of this descriptor; the process's exit code."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(socket.socket(fileno=fd)))


async def _run(connection: socket.socket) -> int:
    connection.setblocking(False)
    link = Link(reads=FROM_MAIN, sends=FROM_API_SERVER)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connection)
    inbox = _Inbox()
    link.begin(inbox.receive)
    waited: list[asyncio.Future[Any]] = [inbox.started, link.lost]
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not inbox.started.done():
        return 0
    start = inbox.started.result()
    settings = Settings.model_validate_json(start.settings)
    with writing(settings.log_level, settings.log_format):
        server = ApiServer(settings, start.limits, MainProcess(link.send, start.count), link)
        inbox.pass_to(server.main.receive)
        await server.serve(socket.socket(fileno=start.listening))
    return 0


def tenants_told(entries: Iterable[str]) -> tuple[TenantEntry, ...]:
    """The tenants from their JSON."""
    return tuple(_TENANT.validate_json(entry, by_name=False, by_alias=True) for entry in entries)


def _application() -> Any:
    from quire_server.app import create_app  # noqa: PLC0415 - heavy: the port answers meanwhile
    from quire_server.state import build_state  # noqa: PLC0415

    return create_app, build_state


class _Inbox:
    """Frames of the main process, kept until there is a receiver for them."""

    def __init__(self) -> None:
        self.started: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self._kept: list[Any] = []
        self._to: Callable[[Any], None] = self._kept.append

    def receive(self, frame: Any) -> None:
        if isinstance(frame, Start):
            self.started.set_result(frame)
        else:
            self._to(frame)

    def pass_to(self, to: Callable[[Any], None]) -> None:
        self._to = to
        for frame in self._kept:
            to(frame)


class ApiServer:
    """One API server, from its first connection to its last."""

    def __init__(self, settings: Settings, limits: ServerLimits, main: MainProcess, link: Link) -> None:
        self.main = main
        self._settings, self._limits, self._link = settings, limits, link
        self._credentials = Credentials(settings)
        self._certificates = 0
        self._adopting: asyncio.Task[None] | None = None  # reads a certificate
        self._tasks: set[asyncio.Task[None]] = set()
        self._state: ServerState | None = None
        self._requests = OpenRequests()
        self._tally: Any = None  # `shared_counts.Tally`, once there is something to count
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        main.on_state, main.on_order = self._take, self._obey

    async def serve(self, listening: socket.socket) -> None:
        """Serve on a listening socket until the main process says so, or is gone."""
        switch = AppSwitch(self.main.forwarder)
        async with listening_on(
            listening, switch, self._settings, self._credentials, self._limits, owns_path=False
        ) as (where, task):
            self._link.send(Ready())
            building = asyncio.create_task(self._build(switch, where))
            try:
                await asyncio.wait([building, self._closing, task, self._link.lost], return_when="FIRST_COMPLETED")
                if building.done():
                    building.result()
                    await asyncio.wait([self._closing, task, self._link.lost], return_when="FIRST_COMPLETED")
            finally:
                building.cancel()
                await asyncio.gather(building, return_exceptions=True)
            if self._link.lost.done():  # no reply can be finished
                where.stop(True)

    async def _build(self, switch: AppSwitch, listening: Listening) -> None:
        """Build the application, and answer what is for it from then on."""
        create_app, build_state = await asyncio.to_thread(_application)
        from quire_server.metrics.shared_counts import Tally  # noqa: PLC0415 - heavy: the port answers meanwhile
        from quire_server.metrics.usage import UsageBook  # noqa: PLC0415

        starting: asyncio.Task[EnginePlan] = asyncio.create_task(self.main.start())
        usage = UsageBook(self._settings.model_names[0])
        state = await build_state(
            self._settings, self.main, starting, self._credentials, usage=usage, limits=self._limits
        )
        state.client = SharedClient(self.main, state.client.plan, state.metrics)
        state.names = TellingNames(self.main.send)
        self._tally = Tally(state.metrics)
        app = create_app(state)
        self._state, self._requests = state, app.state.requests
        if self.main.state is not None:
            self._take(self.main.state)
        switch.watch_connections(state.metrics.connections)
        state.metrics.bytes_waiting = listening.bytes_waiting
        state.metrics.num_stalled = listening.num_stalled
        own = LocalOrForwarded(app, self.main.forwarder, paths=LOCAL_PATHS, root_path=self._settings.root_path)
        await switch.open(app, own)
        # Imported and built objects stay alive: freeze them, so that later collections do not scan them.
        gc.collect()
        gc.freeze()
        log.info("an API server is ready: process %d", os.getpid())

    # ---------------------------------------------------------------- from the main process

    def _take(self, told: MainState) -> None:
        """The common state has changed."""
        keys = told.keys
        self._credentials.adopt(
            {bytes.fromhex(digest): name for digest, name in keys.api.items()},
            tenants_told(keys.tenants),
        )
        if keys.certificates != self._certificates:
            self._certificates = keys.certificates
            self._adopting = self._do(self._credentials.adopt_certificate())
        if self._state is not None:
            phase = self._state.phase
            phase.draining, phase.stopping = told.draining, told.stopping
            self._state.adapters.mirror(told.adapters)

    def _obey(self, order: Order) -> None:
        match order.what:
            case "count":
                self._count(order.token)
            case "idle":
                self._do(self._idle(order.token))
            case "refuse":
                self._requests.refuse_unanswered()
                self.main.send(Done(token=order.token))
            case "close":
                if not self._closing.done():
                    self._closing.set_result(None)

    def _count(self, token: int) -> None:
        """Send the counts, which also says that everything told before holds: a new certificate too."""
        if self._adopting is not None and not self._adopting.done():
            self._adopting.add_done_callback(lambda _: self._count(token))
            return
        counts = None if self._tally is None else self._tally.take()
        self.main.send(Done(token=token, counts=counts))

    async def _idle(self, token: int) -> None:
        await ended(self._requests.work())
        self.main.send(Done(token=token))

    def _do(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
