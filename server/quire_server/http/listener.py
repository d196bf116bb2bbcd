"""The listening socket: binding it, starting and stopping the server on it, and the limit on open files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import resource
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from quire_engine.contract.errors import ConfigError
from quire_engine.own_pauses import OwnPauses
from quire_server.http.acceptor import BACKLOG, Acceptor
from quire_server.http.body_limits import LARGEST_BODY
from quire_server.http.connection import Connection, ConnectionConfig, ConnectionLimits
from quire_server.http.credentials import Credentials
from quire_server.http.door import Door
from quire_server.http.sse import WritePace, bound_buffers
from quire_server.http.starting import AppSwitch
from quire_server.http.turns import Turns
from quire_server.settings import ServerLimits, Settings

GRACE_SECONDS = 5.0  # for replies that are still being written at the stop, after draining
CLOSING_SECONDS = 1.0  # for data in the sockets' buffers, at the stop
_LOOK_SECONDS = 0.1  # between two turns of the server's main loop
_CLOSED_LOOK_SECONDS = 0.005  # between two looks at the stop whether all connections and their tasks have ended

log = logging.getLogger("quire")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A started server. `stop` ends it: listeners first, then each connection after its reply; True cuts them off."""

    address: str  # a URL, or the path of a Unix socket
    port: int | None  # the actual one; None for a Unix socket
    stop: Callable[[bool], None]
    bytes_waiting: Callable[[], int]  # bytes of replies that clients have not received
    num_stalled: Callable[[], int]  # connections whose reply waits for the client to read

    @property
    def where(self) -> str:
        """The address for a log line."""
        return self.address if self.port is not None else f"unix socket {self.address}"


def announce(listening: Listening) -> None:
    """Log that requests are served, in uvicorn's words, for which scripts wait."""
    log.info("Application startup complete.")
    log.info("Uvicorn running on %s (Press CTRL+C to quit)", listening.where)


def bind(settings: Settings) -> socket.socket:
    """Bind the listening address before anything slow starts. Raises ConfigError naming the setting."""
    if settings.uds is not None:
        return _bind_unix(settings.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {settings.host}: {error.strerror or error}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        hint = "; choose another --port, 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}{hint}") from None
    return sock


def bind_for(settings: Settings, count: int) -> list[socket.socket]:
    """Listening sockets for `count` processes on one address. Raises ConfigError naming the setting.

    Each process has a socket of its own (SO_REUSEPORT), so that the system spreads new connections over them evenly:
    of one that all share, the process that wakes first accepts all that have come. The caller keeps the
    sockets open, so that connections for a process that has ended wait for the next one. The first is bound without
    the option, which fails where another server has the port. Sockets in the file system cannot be bound twice: there
    all share one.
    """
    first = bind(settings)
    try:
        sockets = [first]
        if settings.uds is None:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        while len(sockets) < count:
            sockets.append(first if settings.uds is not None else _beside(first))
        for each in dict.fromkeys(sockets):
            each.listen(BACKLOG)
    except OSError as error:
        first.close()
        raise ConfigError(
            f"--api-server-count {count}: the system does not let several processes listen: {error}"
        ) from None
    return sockets


def _beside(first: socket.socket) -> socket.socket:
    """A socket on the address of another one."""
    sock = socket.socket(first.family, first.type, first.proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(first.getsockname())
    return sock


def address_of(sock: socket.socket, settings: Settings) -> tuple[str, int | None]:
    """Return the address of a listening socket, as a URL or a path, and its port."""
    return _address(sock, "http" if settings.ssl_certfile is None else "https")


async def serve(
    app: Callable[..., Any],
    settings: Settings,
    *,
    sock: socket.socket,
    on_started: Callable[[Listening], None],
    on_connections: Callable[[int], None] = lambda _: None,
    limits: ServerLimits | None = None,
    tls: ssl.SSLContext | None = None,
    owns_path: bool = True,
    door: Callable[[], Door | None] = lambda: None,
) -> None:
    """Accept connections on a bound socket until stopped. `on_started` is called once, when clients can connect.

    `on_connections` is called with the number of open connections. Without `limits` their defaults hold.
    `owns_path`: a Unix socket's path ends with this server. `door`: see `ConnectionConfig`.
    """
    limits = limits or ServerLimits()
    most_waiting = allow_connections(settings.max_connections)
    pace = WritePace(seconds=limits.client_write_timeout, bytes_per_second=limits.client_min_rate)
    bound_buffers(sock, pace)
    config = ConnectionConfig(
        app,
        limits=ConnectionLimits(
            max_connections=settings.max_connections,
            max_connections_per_address=-(-settings.max_connections // 2),
            max_header_bytes=limits.max_header_bytes,
            max_body_bytes=settings.max_body_bytes or LARGEST_BODY,
            header_timeout=limits.header_timeout,
            write_pace=pace,
        ),
        uncounted=settings.trusted_proxies,
        on_connections=on_connections,
        keep_alive_seconds=settings.timeout_keep_alive,
        tls=tls,
        door=door,
        pauses=OwnPauses(_LOOK_SECONDS),
        turns=Turns(),
    )

    def stop(cut_off: bool) -> None:
        server.end()
        if cut_off:
            for connection in tuple(server.server_state.connections):
                connection.transport.abort()

    def bytes_waiting() -> int:
        connections = server.server_state.connections
        return sum(each.bytes_waiting for each in connections if isinstance(each, Connection))

    def num_stalled() -> int:
        connections = server.server_state.connections
        return sum(each.is_stalled for each in connections if isinstance(each, Connection))

    def started() -> None:
        address, port = _address(sock, "http" if tls is None else "https")
        on_started(
            Listening(address=address, port=port, stop=stop, bytes_waiting=bytes_waiting, num_stalled=num_stalled)
        )

    server = _Server(config, started, most_waiting)
    try:
        await server.serve(sockets=[sock])
    finally:
        sock.close()
        if settings.uds is not None and owns_path:
            settings.uds.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def listening_on(
    sock: socket.socket,
    switch: AppSwitch,
    settings: Settings,
    credentials: Credentials,
    limits: ServerLimits | None = None,
    *,
    owns_path: bool = True,
) -> AsyncIterator[tuple[Listening, asyncio.Task[None]]]:
    """Accept connections on a socket; on exit, wait briefly for replies, then close their connections.

    `limits`, `owns_path`: see `serve`.
    """
    with contextlib.closing(sock):
        started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(
                switch,
                settings,
                sock=sock,
                on_started=started.set_result,
                on_connections=switch.tell_connections,
                tls=None if credentials.tls is None else credentials.tls.context,
                limits=limits,
                owns_path=owns_path,
                door=lambda: switch.door,
            ),
            name="listener",
        )
        try:
            waited: list[asyncio.Future[Any]] = [started, serving]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                serving.result()
            try:
                yield started.result(), serving
            finally:
                started.result().stop(False)
                await asyncio.wait([serving], timeout=CLOSING_SECONDS)
                started.result().stop(True)
                await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers and fixed pauses of a stop, and with our way to accept."""

    def __init__(self, config: ConnectionConfig, on_started: Callable[[], None], most_waiting: int) -> None:
        super().__init__(config)
        self._config, self._on_started, self._pauses = config, on_started, config.pauses
        self._most_waiting = most_waiting
        self._acceptors: list[Acceptor] = []
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Stop the server, at once."""
        self.should_exit = True
        self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        ticks = itertools.count()
        while not await self.on_tick(next(ticks)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._ending.wait()

    async def on_tick(self, counter: int) -> bool:
        self._pauses.look()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        if not self.started:
            return
        config = self._config
        for sock in sockets or ():
            acceptor = Acceptor(
                sock, self._connection, turns=config.turns, tls=config.tls, most_waiting=self._most_waiting
            )
            acceptor.begin()
            self._acceptors.append(acceptor)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for sock in sockets or ():
            sock.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(_CLOSED_LOOK_SECONDS)
        except TimeoutError:
            log.warning(
                "replies that did not end within %g s of the stop: %d", GRACE_SECONDS, len(self.server_state.tasks)
            )
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()
        for acceptor in self._acceptors:
            await acceptor.wait_closed()

    def _connection(self, has_turn: bool) -> Connection:
        return Connection(self._config, self.server_state, self.lifespan.state, has_turn=has_turn)


def _bind_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _is_answered(path):
            path.unlink()  # left by a server that was killed
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    return sock


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def _address(sock: socket.socket, scheme: str) -> tuple[str, int | None]:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return str(name), None
    host, port = name[0], int(name[1])
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}", port


_OTHERS = 512  # open files for logs, pipes to workers, the engine's sockets, libraries
_descriptors_log = logging.getLogger(__name__)


def allow_connections(number: int) -> int:
    """Raise the soft limit on open files for so many connections, as many refused ones, and those that wait.

    A shell's usual 1,024 would be used up before `--max-connections` is reached: further clients would wait instead of
    being refused, since the event loop could not accept them, and no other file could be opened either. Logs a warning
    if the system does not allow it. Returns how many may wait for their turn, which is the rest of what is allowed.
    """
    needed = 2 * number + _OTHERS
    wanted = needed + BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return BACKLOG
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # a sandbox may forbid it: serve with fewer connections
        allowed = soft
    if allowed < needed:
        _descriptors_log.warning(
            "the system allows this process %d open files, and %d connections need %d: raise the hard limit"
            " (ulimit -Hn, LimitNOFILE=) or lower --max-connections",
            allowed,
            number,
            needed,
        )
    return max(0, allowed - needed)
