"""Feeds what arrives on a connection to its parser, a little at a time.

A read brings 256 KiB, which may be a part of one body, or forty thousand chunks of one byte, or ten thousand requests
one behind the other. Promises: between two slices of it that take long the event loop has its turn, and behind a
request that waits for its turn no more is parsed. Must not know: what the parser is and calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

SLICE_BYTES = 4 << 10  # 200 of the shortest requests, or 700 chunks of one byte: a few milliseconds
TURN_SECONDS = 0.005


class Intake(FlowControl):
    """The connection's flow control, which does not read on while something that was read is left."""

    def __init__(
        self, transport: asyncio.Transport, parse: Callable[[bytes], bool], plain_bytes: Callable[[], int]
    ) -> None:
        """`parse` tells whether more may be parsed now; where not, `go_on` is called when it may.

        `plain_bytes` of what comes next are one piece to the parser, however many they are.
        """
        super().__init__(transport)
        self._parse = parse
        self._plain_bytes = plain_bytes
        self._loop = asyncio.get_running_loop()
        self._left = b""
        self._turn: asyncio.Handle | None = None

    def resume_reading(self) -> None:
        if not self._left:
            super().resume_reading()

    def take(self, data: bytes) -> None:
        """Bytes have arrived."""
        if self._left:
            self._left += data  # of a read that was under way
            return
        self._feed(data)

    def go_on(self) -> None:
        """What is left may be parsed now, when the event loop is free."""
        if self._left and self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def stop(self) -> None:
        """Nothing more will be parsed."""
        self._left = b""
        if self._turn is not None:
            self._turn.cancel()

    def _take_turn(self) -> None:
        self._turn = None
        data, self._left = self._left, b""
        self._feed(data)
        if not self._left:
            self.resume_reading()

    def _feed(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES:
            self._parse(data)
            return
        due = self._loop.time() + TURN_SECONDS
        end = 0
        while end < len(data):
            start, end = end, end + max(SLICE_BYTES, self._plain_bytes())
            may_go_on = self._parse(data[start:end])
            if end < len(data) and (not may_go_on or self._loop.time() > due):
                self._left = data[end:]
                self.pause_reading()
                if may_go_on:
                    self.go_on()
                return
