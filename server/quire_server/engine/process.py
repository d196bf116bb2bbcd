"""One engine as a child process, from its launch to its end.

Owns the child process and its state; every start makes a new object. Promises: a hang ends in a kill, and no child
process is left behind. Must not know: requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, EngineDead, ModelLoadError
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import StepOutput
from quire_engine.machine import PARENTS_SIGNALS, is_stopped, num_oom_kills, work_done
from quire_engine.process.transport import encode_frame
from quire_server.engine.connection import WATCH_SECONDS, EngineConnection

log = logging.getLogger("quire.supervisor")

_SOCKET_BUFFER_BYTES = 4 << 20
_STOPPED_SECONDS = 5.0  # of silence, after which a stopped process is killed
_STARVED_FACTOR = 5  # times the silence that means a loss, for a process that no signal has stopped
_LEAST_WORK = 20  # CPU time in 0.01 s plus MiB read; a start that does less between two looks makes no progress
_BUSY_FACTOR = 10  # times the stall limit: the longest time that a working start may send no progress
_REAP_SECONDS = 0.005
_SECONDS_FOR_STACKS = 0.5  # between the signal that prints the stacks and the kill


class EngineProcess(EngineConnection):
    """A child process, launched when the object is made; `start` tells it which model to load."""

    def __init__(
        self,
        program: Sequence[str],
        on_step: Callable[[StepOutput], None],
        *,
        stderr: int | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        """Launch `program FD PARENT_PID`. Raises EngineDead where that is not possible.

        `stderr`: the child's descriptor for it; None: the server's own, where a slow reader makes the engine wait.
        `cpus`: hardware threads that it runs on; empty: the server's own.
        """
        super().__init__(on_step)
        self._was_absent = False  # whether it was given up because no sign of life came
        self._was_stopped = False  # whether it was given up because a signal had stopped it
        self._killed_by_us = False
        self._oom_kills = num_oom_kills()
        try:
            self._child, self._socket = _launch(program, stderr)
        except OSError as error:
            raise EngineDead(f"the engine process could not be launched: {error}") from error
        if cpus and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # it has ended, or a container forbids it: then the system chooses
                os.sched_setaffinity(self._child.pid, cpus)

    async def start(
        self, config: EngineConfig, stall_seconds: float = 60.0, *, memory: tuple[int | None, int | None] = (None, None)
    ) -> EnginePlan:
        """Build the engine. Raises ConfigError or ModelLoadError as the engine does, EngineDead if the process ends.

        A start without progress for `stall_seconds` is killed. `memory`: files of memory for packed weights and for the
        KV pool, empty or filled by the process before; without the first there is no second.
        """
        self.progressed_at = self._heard = self._seen = time.monotonic()  # a spare process was launched long before
        try:
            with contextlib.suppress(OSError):  # it has ended, which shows at once
                # The first bytes bring the descriptors along, before the transport has the socket.
                socket.send_fds(self._socket, [encode_frame(config)], [fd for fd in memory if fd is not None])
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)
            await self._watch_start(stall_seconds)
        except asyncio.CancelledError:
            await self.reap(grace_seconds=0.0)
            raise
        answer = self._answer.result()
        if isinstance(answer, EnginePlan):
            return answer
        await self.reap(grace_seconds=1.0)
        if answer is None:
            raise EngineDead(f"the engine process {self.ending} while starting")
        raise (ConfigError if answer.kind == "config" else ModelLoadError)(answer.message)

    @property
    def pid(self) -> int | None:
        """The process id; None once it has ended and was reaped."""
        return self._child.pid if self._child.returncode is None else None

    @property
    def runs(self) -> bool:
        """Whether the process has not ended."""
        return self._child.poll() is None

    @property
    def ending(self) -> str:
        """How the process ended, once it is reaped."""
        code = self._child.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    @property
    def ended_by_others(self) -> bool:
        """Whether a SIGKILL or SIGSTOP from outside ended it, which its own computations do not send."""
        had_memory = self._oom_kills is not None and self._oom_kills == num_oom_kills()
        return self._was_stopped or (self._was_killed and had_memory)

    @property
    def end_is_doubtful(self) -> bool:
        """Whether what it has computed may be the cause or not: the kernel's lack of memory, or silence, ended it."""
        return not self.ended_by_others and (self._was_killed or self._was_absent)

    @property
    def _was_killed(self) -> bool:
        return self._child.returncode == -signal.SIGKILL and not self._killed_by_us

    async def wait_for_end(self, hang_seconds: Callable[[], float], absent_seconds: float | None = None) -> None:
        """Wait until the socket closes; kill the process after a silence of `hang_seconds()`.

        `absent_seconds`: without any sign of life that mean that a stopped process is lost, for processes that send
        them; one that is not stopped may lack a core for a while, and gets several times that.
        """
        while not await self._ends_or_waits(self._lost):
            if absent_seconds is not None and self.absence >= absent_seconds:
                stopped = is_stopped(self._child.pid)
                if stopped or self.absence >= _STARVED_FACTOR * absent_seconds:
                    log.error("no sign of life from the engine process for %.1f s: it is given up", self.absence)
                    self._was_absent, self._was_stopped = True, stopped
                    self._kill()
                    return
            limit = hang_seconds()
            stopped = self.silence >= min(limit, _STOPPED_SECONDS) and is_stopped(self._child.pid)
            if stopped or self.silence >= limit:
                log.error("no sign of life from the engine for %.1f s: it is killed", self.silence)
                await self._end_hung(stopped)
                return

    async def _watch_start(self, stall_seconds: float) -> None:
        """Wait until the start is answered or the process has ended; kill it if it makes no progress."""
        work, worked_at = 0, self.progressed_at
        while not await self._ends_or_waits(self._answer):
            done = work_done(self._child.pid)
            if done >= work + _LEAST_WORK:
                work, worked_at = done, time.monotonic()
            idle, unsaid = (self._pauses.silence(at) for at in (max(worked_at, self.progressed_at), self.progressed_at))
            stopped = idle >= min(stall_seconds, _STOPPED_SECONDS) and is_stopped(self._child.pid)
            if stopped or idle >= stall_seconds or unsaid >= _BUSY_FACTOR * stall_seconds:
                log.error(
                    "the start of the engine has not got on for %.0f s (%s): it is killed",
                    idle if stopped or idle >= stall_seconds else unsaid,
                    "nothing was said of it" if self.progress is None else f"last: {self.progress.phase}",
                )
                await self._end_hung(stopped)
                await asyncio.wait([self._answer])

    async def _ends_or_waits(self, end: asyncio.Future[Any]) -> bool:
        """Whether `end` has come within a moment."""
        done, _ = await asyncio.wait([end], timeout=WATCH_SECONDS)
        self._pauses.look()
        return bool(done)

    async def _end_hung(self, stopped: bool) -> None:
        self._was_stopped = stopped
        if stopped:
            log.error("the engine process is stopped by a signal or a debugger, so it can print no stacks")
        else:
            log.error("the stacks of the engine process follow")
            self._child.send_signal(signal.SIGUSR1)
            await asyncio.sleep(_SECONDS_FOR_STACKS)
        self._kill()

    async def reap(self, *, grace_seconds: float) -> None:
        """Wait for the process to end, and kill it after `grace_seconds`. Idempotent, also after a cancelled call.

        It polls instead of waiting in a thread, since no thread can be started while an interpreter ends.
        """
        deadline = time.monotonic() + grace_seconds
        while self._child.poll() is None:
            if not self._killed_by_us and time.monotonic() >= deadline:
                self._kill()
            await asyncio.sleep(_REAP_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the socket, which ends the process. Idempotent."""
        if self._transport is not None:
            self._transport.close()
        else:
            self._socket.close()

    def _kill(self) -> None:
        self._killed_by_us = True
        self._child.kill()


def _launch(program: Sequence[str], stderr: int | None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            ours.setblocking(False)
            command = [*program, str(theirs.fileno()), str(os.getpid())]
            handed_on = (theirs.fileno(),)
            # Popen, not asyncio's: only this object reaps the child, and spawning takes about a millisecond.
            # A group of its own, which a Ctrl-C in the terminal does not reach. A signal to all processes of a service,
            # or before the child has that group, stays pending there until the child ignores it.
            with _blocked(PARENTS_SIGNALS):
                child = subprocess.Popen(
                    command, pass_fds=handed_on, stdin=subprocess.DEVNULL, stderr=stderr, process_group=0
                )
            return child, ours
        except BaseException:
            ours.close()
            raise


@contextlib.contextmanager
def _blocked(signals: frozenset[signal.Signals]) -> Iterator[None]:
    """Delay these signals in this thread, and in a process that it starts until that unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
