"""One API server as a child process of the main process, from its launch to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess

from quire_engine.machine import PARENTS_SIGNALS
from quire_engine.own_modules import module_command
from quire_server.api_servers.frames import Start
from quire_server.api_servers.session import Session

_BUFFER_BYTES = 1 << 20  # of the socket pair, in each direction
_LOOK_SECONDS = 0.01


class ApiServerProcess:
    """A process with its link. Its owner waits for `session.link.lost`, and then calls `end`, which kills it."""

    def __init__(self, session: Session, listening: socket.socket) -> None:
        """Launch it. Raises OSError where that is not possible."""
        self.session = session
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            ours.setblocking(False)
            # A signal to all processes of a service stays pending there until the child ignores it: the main process
            # tells it when to stop.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
            try:
                self._child = subprocess.Popen(
                    module_command("quire_server.api_servers", str(theirs.fileno()), str(os.getpid())),
                    pass_fds=(theirs.fileno(), listening.fileno()),
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._socket = ours

    @property
    def pid(self) -> int:
        return self._child.pid

    async def begin(self, start: Start) -> None:
        """Connect the link, and tell the process what it is to be."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self.session.link, sock=self._socket)
        self.session.link.begin(self.session.receive)
        self.session.link.send(start)

    async def end(self, seconds: float = 0.0) -> str:
        """Wait so long for its end, then kill it; returns how it ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._child.poll() is None and loop.time() < deadline:  # noqa: ASYNC110 - a process ends once
            await asyncio.sleep(_LOOK_SECONDS)
        if self._child.poll() is None:
            self._child.kill()
        code = await asyncio.to_thread(self._child.wait)
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
