"""The server's end of an engine's socket: frames, questions and their answers, silence.

Promises: frames in order; who asks is answered, or told that the engine has ended. Must not know: requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count
from typing import cast

from quire_engine.contract.errors import EngineDead, ProtocolError, QuireError, Unanswerable
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import EngineHealth, StepOutput
from quire_engine.own_pauses import OwnPauses
from quire_engine.process.transport import (
    Alive,
    Control,
    Frame,
    FrameDecoder,
    Inspect,
    Inspected,
    LoadProgress,
    StartFailed,
    encode_frame,
)

log = logging.getLogger("quire.supervisor")

WATCH_SECONDS = 0.5  # between two looks at an engine
MOST_QUESTIONS = 32  # unanswered questions at once
_ONLY_ALIVE: list[Frame] = [Alive()]


class TooManyQuestions(QuireError):
    """Too many questions at once: the engine answers them one after the other, between its steps."""


class EngineConnection(asyncio.Protocol):
    """One connection to one engine, which ends with it; a new engine gets a new object."""

    def __init__(self, on_step: Callable[[StepOutput], None]) -> None:
        """`on_step`: called with each step's outputs, on the event loop that is running now."""
        self.progressed = False  # whether a step has brought outputs
        self.progress: LoadProgress | None = None  # the latest progress of its start
        self.progressed_at = time.monotonic()  # when that came; before it, the time of the launch or start
        self.on_step = on_step
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[EnginePlan | StartFailed | None] = (
            loop.create_future()
        )  # the reply to START; None: the connection is lost
        self._lost: asyncio.Future[None] = loop.create_future()
        self._asked: dict[int, asyncio.Future[Inspected]] = {}
        self._tokens = count()
        self._latest: StepOutput | EngineHealth = EngineHealth(alive=True, step_id=0, has_work=False)
        self._seen = self._heard = time.monotonic()  # the last bytes; the last ones of the engine's loop
        self._pauses = OwnPauses(WATCH_SECONDS)

    @property
    def connected(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def health(self) -> EngineHealth:
        """The engine's health at its last step or heartbeat."""
        if isinstance(self._latest, EngineHealth):
            return self._latest
        return EngineHealth(alive=True, step_id=self._latest.step_id, has_work=True)

    def send(self, frame: Frame) -> None:
        """Send a frame; does nothing once the connection is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(frame))

    async def ask(self, kind: type[Inspect | Control], what: str, argument: str) -> bytes:
        """The engine's answer, JSON. Raises Unanswerable with the engine's text, TooManyQuestions, EngineDead."""
        if len(self._asked) >= MOST_QUESTIONS:
            raise TooManyQuestions(f"{MOST_QUESTIONS} questions are not answered yet")
        token = next(self._tokens)
        asked: asyncio.Future[Inspected] = asyncio.get_running_loop().create_future()
        self._asked[token] = asked
        try:
            self.send(kind(token=token, what=what, argument=argument))
            answer = await asked
        finally:
            del self._asked[token]
        if answer.error:
            raise Unanswerable(answer.error)
        return answer.body

    @property
    def silence(self) -> float:
        """Seconds since the loop's last frame; an engine sends one per step, and one per second while idle."""
        return self._pauses.silence(self._heard)

    @property
    def absence(self) -> float:
        """Seconds since the last bytes, signs of life among them: of the process, whatever its step does."""
        return self._pauses.silence(self._seen)

    # ---------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the base class

    def data_received(self, data: bytes) -> None:
        self._seen = time.monotonic()
        try:
            frames = self._decoder.feed(data)
            if frames != _ONLY_ALIVE:
                self._heard = self._seen
            for frame in frames:
                match frame:
                    case StepOutput():
                        self._latest = frame
                        self.progressed = self.progressed or bool(frame.outputs)
                        self.on_step(frame)
                    case EngineHealth():
                        self._latest = frame
                    case LoadProgress():
                        self.progress, self.progressed_at = frame, self._heard
                    case Alive():
                        pass
                    case Inspected():
                        asked = self._asked.get(frame.token)
                        if asked is not None and not asked.done():  # otherwise the caller has stopped waiting
                            asked.set_result(frame)
                    case EnginePlan() | StartFailed() if not self._answer.done():
                        self._answer.set_result(frame)
                    case _:
                        raise ProtocolError(f"an unexpected {type(frame).__name__} frame from the engine")
        except ProtocolError:
            log.exception("the engine sent bytes that are not a frame; restarting it")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_result(None)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(EngineDead("the engine process ended while it was asked"))
        self._lost.set_result(None)
