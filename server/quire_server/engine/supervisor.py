"""Starts, watches and restarts the engine process; an `EnginePort` for the rest of the server.

Owns the child and its socket, and the journal of live requests. Promises: a crash or hang of the engine is a pause for
clients, with identical tokens afterwards. Must not know: HTTP, text, what is in a batch.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from os import getpid
from typing import cast

from quire_engine.config import EngineConfig, EnginePlan
from quire_engine.errors import ConfigError, EngineDead, ModelLoadError, ProtocolError, QuireError
from quire_engine.process.transport import Abort, Frame, FrameDecoder, StartFailed, encode_frame
from quire_engine.types import Control, EngineHealth, EngineStats, GenerationRequest, StepOutput, TokenOutput
from quire_server.engine.journal import Journal, JournalEntry

log = logging.getLogger("quire.supervisor")

_SOCKET_BUFFER_BYTES = 4 << 20
_SLOWEST_FLOPS = 2e10  # of a machine on which one would still serve: a full step of a big model may take minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When to give up on an engine that keeps dying, and when to call it hung."""

    max_restarts: int = 5
    window_seconds: float = 600.0
    hang_seconds: float = 60.0  # silence that means a hang, unless the largest step may take longer
    first_backoff_seconds: float = 0.1  # doubled with each failed start in a row


class EngineState(Enum):
    """The life of the engine as the server sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    DEAD = "dead"  # given up; the server exits with 70


class _Connection(asyncio.Protocol):
    """The API process's end of the socket."""

    def __init__(self, on_frame: Callable[[Frame], None]) -> None:
        self._on_frame = on_frame
        self._decoder = FrameDecoder()
        self.transport: asyncio.Transport | None = None
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the base class

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except ProtocolError:
            log.exception("the engine sent bytes that are not a frame; restarting it")
            if self.transport is not None:
                self.transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, frame: Frame) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(encode_frame(frame))


def _discard(_: StepOutput) -> None:
    pass


class Supervisor:
    """One engine process after another, behind the five methods of `EnginePort`."""

    def __init__(
        self,
        config: EngineConfig,
        policy: RestartPolicy | None = None,
        *,
        program: Sequence[str] = (sys.executable, "-m", "quire_engine.process"),
    ) -> None:
        self.on_step: Callable[[StepOutput], None] = _discard
        self.on_restart: Callable[[], None] = lambda: None
        self.state = EngineState.STARTING
        self.restarts = 0
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._config = config
        self._checkpoint = ""
        self._policy = policy or RestartPolicy()
        self._hang_seconds = self._policy.hang_seconds
        self._program = tuple(program)
        self._journal = Journal()
        self._replay: deque[str] = deque()  # suspects not yet resubmitted, one at a time after a crash
        self._probation: str | None = None  # the suspect that runs now and has not produced anything yet
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: _Connection | None = None
        self._plan: asyncio.Future[EnginePlan] | None = None
        self._health = EngineHealth(alive=False, step_id=0, has_work=False)
        self._heard = time.monotonic()
        self._progressed = False  # this engine process has delivered something
        self._failures: deque[float] = deque()
        self._watch: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- EnginePort

    def submit(self, request: GenerationRequest) -> None:
        entry = self._journal.add(request)
        if self.state is EngineState.READY:
            self._send_request(entry)
        elif self.state in (EngineState.STOPPED, EngineState.DEAD):
            self._fail(entry, "the engine is not running")
        else:
            self._replay.append(request.request_id)

    def abort(self, request_id: str) -> None:
        entry = self._journal.remove(request_id)
        if entry is not None and entry.in_flight and self._connection is not None:
            self._connection.send(Abort(request_id=request_id))
        if request_id == self._probation:
            self._probation = None
            self._replay_next()

    def control(self, command: Control) -> None:
        if self._connection is not None:
            self._connection.send(command)

    def health(self) -> EngineHealth:
        return self._health

    # ---------------------------------------------------------------- life

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> EnginePlan:
        """Start the first engine. Raises ConfigError or ModelLoadError as the engine does, EngineDead if it crashes."""
        plan = await self._launch()
        self._checkpoint = plan.checkpoint
        # A later engine must keep what requests were checked against, however much memory is free by then.
        self._config = replace(
            self._config, kv_memory=plan.kv_bytes or None, max_model_len=plan.scheduler.max_model_len
        )
        self._hang_seconds = hang_limit(self._policy, plan)
        self.state = EngineState.READY
        self._watch = asyncio.create_task(self._run(), name="engine-supervisor")
        self._replay_next()
        return plan

    async def stop(self) -> None:
        """End the engine process; unfinished requests end with an error. Idempotent."""
        if self.state is not EngineState.DEAD:
            self.state = EngineState.STOPPED
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self._connection is not None:
            self._connection.send(Control(kind="shutdown"))
        await self._reap(grace_seconds=2.0)
        for entry in list(self._journal):
            self._fail(entry, "the server is shutting down")

    # ---------------------------------------------------------------- one process

    async def _launch(self) -> EnginePlan:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        ours.setblocking(False)
        command = [*self._program, str(theirs.fileno()), str(getpid())]
        # Popen, not asyncio's: the child is reaped by us alone, and spawning takes about a millisecond.
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)  # noqa: ASYNC220
        theirs.close()
        loop = asyncio.get_running_loop()
        self._plan = loop.create_future()
        self._progressed = False
        self._heard = time.monotonic()
        _, self._connection = await loop.create_unix_connection(lambda: _Connection(self._on_frame), sock=ours)
        self._connection.send(self._config)
        lost = self._connection.lost
        try:
            await asyncio.wait([self._plan, lost], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._reap(grace_seconds=0.0)
            raise
        if self._plan.done():
            try:
                return self._plan.result()
            except QuireError:
                await self._reap(grace_seconds=1.0)
                raise
        code = await self._reap(grace_seconds=1.0)
        raise EngineDead(f"the engine process {_ended(code)} while starting")

    async def _reap(self, *, grace_seconds: float) -> int:
        """Wait for the process to end, by force after `grace_seconds`. Returns its code (negative: signal)."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is None:
            return 0
        try:
            code = await asyncio.to_thread(process.wait, grace_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = await asyncio.to_thread(process.wait)
        if connection is not None and connection.transport is not None:
            connection.transport.close()
        return code

    async def _run(self) -> None:
        """Watch the engine; when it ends, start another and replay, until it has failed too often."""
        while True:
            killed_by_us = await self._wait_for_end()
            code = await self._reap(grace_seconds=1.0)
            self.state = EngineState.RESTARTING
            self._health = EngineHealth(alive=False, step_id=0, has_work=len(self._journal) > 0)
            log.error("the engine process %s with %d live requests; restarting", _ended(code), len(self._journal))
            killed = code == -signal.SIGKILL and not killed_by_us
            for entry in self._journal.crashed(killed=killed):
                self._fail(entry, "this request has taken the engine down; it will not be tried again", culprit=True)
            if not (killed and self._progressed):
                self._failures.append(time.monotonic())
            if not await self._restart():
                return

    async def _restart(self) -> bool:
        """Start engines until one is ready. False: given up."""
        backoff = self._policy.first_backoff_seconds
        while True:
            horizon = time.monotonic() - self._policy.window_seconds
            while self._failures and self._failures[0] < horizon:
                self._failures.popleft()
            if len(self._failures) > self._policy.max_restarts:
                self._give_up(f"the engine failed {len(self._failures)} times in {self._policy.window_seconds:.0f} s")
                return False
            self.restarts += 1
            self.on_restart()
            try:
                plan = await self._launch()
                break
            except (EngineDead, ConfigError, ModelLoadError) as error:
                log.error("restart failed: %s", error)
                self._failures.append(time.monotonic())
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, 10.0)
        if plan.checkpoint != self._checkpoint:
            # Resuming on other weights would splice two models into one answer.
            self._give_up("the model's files changed on disk since the start")
            return False
        self.state = EngineState.READY
        log.info("the engine is ready again; resuming %d requests", len(self._journal))
        self._probation = None
        self._replay = deque(entry.request.request_id for entry in self._journal if not entry.in_flight)
        self._replay_next()
        return True

    async def _wait_for_end(self) -> bool:
        """Until the socket closes or the engine hangs. True: it hung and was killed."""
        assert self._connection is not None
        while True:
            done, _ = await asyncio.wait([self._connection.lost], timeout=1.0)
            if done:
                return False
            silence = time.monotonic() - self._heard
            if silence > self._hang_seconds and self._process is not None:
                log.error("no sign of life from the engine for %.0f s; its stacks follow, then it is killed", silence)
                self._process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(0.5)
                self._process.kill()
                return True

    def _give_up(self, reason: str) -> None:
        self.state = EngineState.DEAD
        log.critical("%s; giving up", reason)
        for entry in list(self._journal):
            self._fail(entry, "the engine could not be restarted")
        self.dead.set_result(None)

    # ---------------------------------------------------------------- frames

    def _on_frame(self, frame: Frame) -> None:
        self._heard = time.monotonic()
        match frame:
            case StepOutput():
                self._on_step_output(frame)
            case EngineHealth():
                self._health = frame
            case EnginePlan() if self._plan is not None and not self._plan.done():
                self._health = EngineHealth(alive=True, step_id=0, has_work=False)
                self._plan.set_result(frame)
            case StartFailed() if self._plan is not None and not self._plan.done():
                failure = ConfigError if frame.kind == "config" else ModelLoadError
                self._plan.set_exception(failure(frame.message))
            case _:
                raise ProtocolError(f"an unexpected {type(frame).__name__} frame from the engine")

    def _on_step_output(self, step: StepOutput) -> None:
        self._health = EngineHealth(alive=True, step_id=step.step_id, has_work=True)
        live = []
        for output in step.outputs:
            if self._journal.record(output) is None:
                continue  # aborted while the output was on its way
            self._progressed = True
            live.append(output)
            if output.request_id == self._probation:
                self._probation = None
        if len(live) != len(step.outputs):
            step = StepOutput(step_id=step.step_id, outputs=tuple(live), stats=step.stats)
        self.on_step(step)
        if self._probation is None and self._replay:
            self._replay_next()

    def _replay_next(self) -> None:
        """Resubmit what waits, in order; a suspect runs without the other suspects until it has made progress.

        So a second crash has one culprit, and the requests that only shared a batch with it are never blamed.
        """
        while self._replay and self._probation is None and self.state is EngineState.READY:
            request_id = self._replay.popleft()
            entry = self._journal.get(request_id)
            if entry is None or entry.in_flight:
                continue
            if entry.strikes > 0:
                self._probation = request_id
            self._send_request(entry)

    def _send_request(self, entry: JournalEntry) -> None:
        assert self._connection is not None
        entry.in_flight = True
        self._connection.send(entry.resumed_request())

    def _fail(self, entry: JournalEntry, message: str, *, culprit: bool = False) -> None:
        """Deliver the terminal outputs that the engine cannot."""
        self._journal.remove(entry.request.request_id)
        outputs = tuple(
            TokenOutput(
                request_id=entry.request.request_id, choice=choice, finish="error", error=message, culprit=culprit
            )
            for choice in range(entry.request.n)
            if choice not in entry.finished
        )
        self.on_step(StepOutput(step_id=self._health.step_id, outputs=outputs, stats=EngineStats()))


def hang_limit(policy: RestartPolicy, plan: EnginePlan) -> float:
    """Seconds of silence that mean a hang: the policy's, or what the model's largest step may take if that is more."""
    full_step = 2.0 * plan.num_parameters * plan.scheduler.max_num_batched_tokens / _SLOWEST_FLOPS
    return max(policy.hang_seconds, full_step)


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"
