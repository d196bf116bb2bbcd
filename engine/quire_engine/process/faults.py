"""Fault injection in the engine process: starts that fail or hang, and bytes that are not a frame.

Promises: a process without faults does not load this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from socket import socket

from quire_engine.contract.config import Fault
from quire_engine.contract.types import StepOutput
from quire_engine.engine import Engine
from quire_engine.process.loop import EngineLoop, Garbage
from quire_engine.process.pace import Pace
from quire_engine.process.transport import Frame, FrameDecoder

EXIT_CODE = 87
_GARBAGE = b"\xff" * 64


def fail_start(faults: Iterable[Fault]) -> None:
    """Exit, or sleep for ever, where a fault asks for it."""
    for fault in faults:
        if fault.point == "start.fail":
            os._exit(EXIT_CODE)
        while fault.point == "start.hang":
            time.sleep(1.0)


class GarblingLoop(EngineLoop):
    """Sends garbage in place of some steps' outputs."""

    def __init__(
        self,
        engine: Engine,
        connection: socket,
        decoder: FrameDecoder,
        faults: Iterable[Fault],
        *,
        alive_seconds: float = 0.0,
        garbage: Garbage | None = None,
        pace: Pace | None = None,
    ) -> None:
        super().__init__(engine, connection, decoder, alive_seconds=alive_seconds, garbage=garbage, pace=pace)
        self._socket = connection
        self._garbled = {fault.nth for fault in faults if fault.point == "ipc.garbage"}
        self._outputs = 0

    def send(self, frame: Frame) -> None:
        if isinstance(frame, StepOutput):
            self._outputs += 1
            if not self._garbled.isdisjoint((0, self._outputs)):
                self._socket.sendall(_GARBAGE)
                return
        super().send(frame)
