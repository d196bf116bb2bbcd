"""Tells a service manager, such as systemd, the state of the server: that it is ready, stops, and lives.

Promises: nothing is sent without NOTIFY_SOCKET; a service manager that is gone costs one line in the log, and one that
is slow learns of the ready server later.
Must not know: HTTP, the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from quire_server.settings.sources import NotifyAddress, notify_address

_STATUS_SECONDS = 2.0  # between two looks at the progress of a start

log = logging.getLogger("quire")


@dataclass(slots=True, kw_only=True)
class ServiceManager:
    """The messages of systemd's sd_notify(3), each a datagram of `NAME=value` lines."""

    address: NotifyAddress | None  # None: there is no service manager
    is_ready: bool = False
    _last_status: str = field(default="", init=False)
    _has_complained: bool = field(default=False, init=False)
    _waiting: bytes = field(default=b"", init=False)  # a change of state for which the socket had no room

    def ready(self, status: str) -> None:
        """Requests are served from now on; `status` is one line for people."""
        self.is_ready = True
        self._send("READY=1", f"STATUS={status}")

    def stopping(self) -> None:
        """The server is asked to stop, and drains."""
        self._send("STOPPING=1", "STATUS=stopping: requests that were accepted may finish")

    def alive(self) -> None:
        """The event loop runs: the watchdog is content for another period."""
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for people, sent where it is another one than the last."""
        if text != self._last_status:
            self._last_status = text
            self._send(f"STATUS={text}")

    def again(self) -> None:
        """Send a change of state that found no room in the socket."""
        waiting, self._waiting = self._waiting, b""
        if waiting:
            self._send(waiting.decode())

    def _send(self, *lines: str) -> None:
        if self.address is None:
            return
        path, message = self.address.path, "\n".join(lines).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                # An address in the abstract namespace is written with an @ in place of its zero byte.
                sock.connect(f"\0{path[1:]}" if path.startswith("@") else path)
                sock.send(message)
        except BlockingIOError:  # signs of life come again by themselves
            if message.startswith((b"READY", b"STOPPING")):
                self._waiting = message
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                log.warning("the service manager at %s cannot be reached: %s", path, error.strerror or error)


@contextlib.asynccontextmanager
async def service_manager(stop: asyncio.Future[None], progress: Callable[[], str]) -> AsyncIterator[ServiceManager]:
    """A service manager that learns of the stop and, if it asks for signs of life, gets them from the event loop.

    `progress` is the status until the server is ready.
    """
    manager = ServiceManager(address=notify_address())
    if manager.address is None:
        yield manager
        return
    stop.add_done_callback(lambda _: manager.stopping())
    beating = asyncio.create_task(_beat(manager, manager.address.watchdog_seconds, progress), name="service manager")
    try:
        yield manager
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _beat(manager: ServiceManager, watchdog_seconds: float | None, progress: Callable[[], str]) -> None:
    # Half the period, as sd_watchdog_enabled(3) advises.
    seconds = min(_STATUS_SECONDS, watchdog_seconds / 2) if watchdog_seconds else _STATUS_SECONDS
    while True:
        manager.again()
        if watchdog_seconds:
            manager.alive()
        if not manager.is_ready:
            manager.status(progress())
        await asyncio.sleep(seconds)
