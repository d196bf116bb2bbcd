"""The engine process's loop: read the socket, step, send the outputs; a heartbeat when idle.

Owns the engine's end of the socket. Promises: an abort that has arrived is seen before the next step; the loop ends
when the peer closes the socket. Must not know: HTTP.
"""

from __future__ import annotations

import gc
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from quire_engine.contract.errors import ProtocolError, Unanswerable
from quire_engine.contract.types import PACE, GenerationRequest
from quire_engine.engine import Engine
from quire_engine.process.pace import Pace
from quire_engine.process.transport import (
    Abort,
    Alive,
    Control,
    Frame,
    FrameDecoder,
    FrameEncoder,
    Hold,
    Inspect,
    Inspected,
    Release,
    Shutdown,
    encode_frame,
)

MAX_BODY_BYTES = 8 << 20  # every stream waits while an answer is made and sent


def inspected(engine: Engine, question: Inspect) -> Inspected:
    """The reply to a question about the engine's state."""
    return _answered(engine.inspect, question)


def controlled(engine: Engine, order: Control) -> Inspected:
    """The reply to an operator's order."""
    return _answered(engine.control, order)


def _answered(answer: Callable[[str, Mapping[str, Any]], object], asked: Inspect | Control) -> Inspected:
    try:
        arguments = msgspec.json.decode(asked.argument, type=dict[str, Any])
        body = msgspec.json.encode(answer(asked.what, arguments))
    except Unanswerable as error:
        return Inspected(token=asked.token, error=str(error))
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        return Inspected(token=asked.token, error=f"the question {asked.what!r} cannot be read: {error}")
    if len(body) > MAX_BODY_BYTES:
        return Inspected(token=asked.token, error=f"the answer has {len(body)} bytes; ask for less at a time")
    return Inspected(token=asked.token, body=body)


HEARTBEAT_SECONDS = 1.0
_RECEIVE_BYTES = 1 << 20


class Garbage:
    """Python's cycle collector, which runs between steps alone, where no stream waits for a token of this step.

    In a step a collection would come at any allocation, of the oldest generation too, which takes milliseconds. Steps
    leave next to no cycles behind, so that few collections are enough.
    """

    EVERY = 20_000  # objects that are there in addition since the last collection; about as many as a hundred requests
    _OLDER = 10  # collections of the young objects for each one of all

    def __init__(self) -> None:
        gc.disable()
        self._collected = 0
        self._is_clean = True

    def after_step(self) -> None:
        """A step's outputs are sent."""
        self._is_clean = False
        if gc.get_count()[0] >= self.EVERY:
            self._collected += 1
            gc.collect(2 if self._collected % self._OLDER == 0 else 1)

    def rest(self) -> None:
        """Collect all garbage, once, while there is nothing to compute."""
        if not self._is_clean:
            gc.collect()
            self._is_clean = True


class EngineLoop:
    """Runs an engine for the peer at the other end of a connected stream socket."""

    def __init__(
        self,
        engine: Engine,
        connection: socket.socket,
        decoder: FrameDecoder,
        *,
        alive_seconds: float = 0.0,
        garbage: Garbage | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`alive_seconds`: between two signs of life that come also during a step; 0: there are none. `garbage`: where
        the process is the engine's own; else the collector is left as it is. `pace`: where an operator may pause it."""
        self._engine = engine
        self._connection = connection
        self._decoder = decoder
        self._encoder = FrameEncoder()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._stopping = False
        self._sent = time.monotonic()  # when the latest frame was sent
        self._alive_seconds, self._garbage, self._pace = alive_seconds, garbage, pace
        self._sending = threading.Lock()  # frames must not be cut by those of the other thread
        engine.on_step = self.send

    def run(self, early_frames: list[Frame]) -> None:
        """Run until the peer closes the socket or asks for a shutdown. `early_frames` arrived with the start frame."""
        for frame in early_frames:
            self._dispatch(frame)
        if self._alive_seconds:
            threading.Thread(target=self._tell_alive, name="alive", daemon=True).start()
        while not self._stopping:
            self.drain_inbox()
            if self._engine.has_work and not self._stopping:
                if self._pace is None or self._may_step(self._pace):
                    self._engine.step()
                # Steps without outputs may wait for a grammar: without a heartbeat the watchdog would see a hang.
                if time.monotonic() - self._sent > HEARTBEAT_SECONDS:
                    self.send(self._engine.health())
                if self._garbage is not None:
                    self._garbage.after_step()

    def send(self, frame: Frame) -> None:
        """Send a frame. Blocks until the peer's buffer has room: the API process always reads."""
        self._sent = time.monotonic()
        data = self._encoder.encode(frame)
        try:
            with self._sending:
                self._connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            self._stopping = True

    def _tell_alive(self) -> None:
        """Send signs of life until the connection ends. A step of a large model may be silent for minutes."""
        data = encode_frame(Alive())
        with suppress(OSError):
            while not self._stopping:
                with self._sending:
                    self._connection.sendall(data)
                time.sleep(self._alive_seconds)

    def drain_inbox(self) -> None:
        """Handle all frames that have arrived; wait for one when there is nothing to compute."""
        timeout = self._patience()
        while not self._stopping:
            if not self._poll.poll(timeout * 1000):
                if not self._engine.has_work:
                    self._engine.rest()
                    self._prepare()
                    if self._garbage is not None:
                        self._garbage.rest()
                    self.send(self._engine.health())
                return
            data = self._connection.recv(_RECEIVE_BYTES)
            if not data:
                self._stopping = True
                return
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
            timeout = self._patience()

    def _patience(self) -> float:
        """Seconds to wait for a frame before anything else is done."""
        if not self._engine.has_work:
            return HEARTBEAT_SECONDS
        return 0.0 if self._pace is None else min(self._pace.delay(time.monotonic()), HEARTBEAT_SECONDS)

    def _may_step(self, pace: Pace) -> bool:
        now = time.monotonic()
        if pace.delay(now) > 0.0:
            return False
        pace.begins(now)
        return True

    def _change_pace(self, arguments: Mapping[str, Any]) -> object:
        if self._pace is None:
            raise Unanswerable("this engine was not started as one that may be paused")
        return self._pace.order(arguments, time.monotonic())

    def _prepare(self) -> None:
        """Do what later steps would wait for, until that is done or a frame arrives."""
        while not self._poll.poll(0) and self._engine.prepare():
            if time.monotonic() - self._sent > HEARTBEAT_SECONDS:
                self.send(self._engine.health())

    def _dispatch(self, frame: Frame) -> None:
        match frame:
            case GenerationRequest():
                self._engine.submit(frame)
            case Abort():
                self._engine.abort(frame.request_id)
            case Hold():
                self._engine.hold_request(frame.request_id)
            case Release():
                self._engine.release_request(frame.request_id)
            case Inspect():
                self.send(inspected(self._engine, frame))
            case Control(what=what) if what == PACE:
                self.send(_answered(lambda _, arguments: self._change_pace(arguments), frame))
            case Control():
                self.send(controlled(self._engine, frame))
            case Shutdown():
                self._stopping = True
            case _:
                raise ProtocolError(f"a {type(frame).__name__} frame does not belong in the engine's inbox")
