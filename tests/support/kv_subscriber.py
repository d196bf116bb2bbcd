"""A subscriber to KV events as others write them: batches in order, a replay after a gap, a set of cached blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

SECONDS = 60.0


class Subscriber:
    """`held`: (group, name) of all blocks that the engine has told of and not taken back."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "") -> None:
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self.held: set[tuple[int, int]] = set()
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.stored: list[dict[str, Any]] = []
        self.num_replays = self.num_cleared = 0
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(endpoint)
        self._events.subscribe(topic.encode())
        self.ask = self._context.socket(zmq.DEALER)
        if replay_endpoint is not None:
            self.ask.connect(replay_endpoint)
        self._last = -1  # number of the batch that was applied last

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Needed: a context with open sockets keeps its process from ending."""
        self._context.destroy(linger=0)

    def joined(self, tell: Callable[[], None]) -> None:
        """Let the publisher speak until it is heard, and then take in all that it has said."""
        ends = time.monotonic() + SECONDS
        while not self._events.poll(10):
            assert time.monotonic() < ends, "the publisher was not heard"
            tell()
        while self._events.poll(50):
            self._take(*self.raw()[1:])
        self.num_cleared = 0

    def raw(self) -> list[bytes]:
        """The next message. Raises AssertionError."""
        assert self._events.poll(SECONDS * 1000), "no message has come"
        return self._events.recv_multipart()

    def until(self, held: set[tuple[int, int]]) -> None:
        """Take in messages until the set is this one; asks for a replay wherever a number is missing."""
        ends = time.monotonic() + SECONDS
        while self.held != held:
            assert time.monotonic() < ends, f"{self.held ^ held} after {SECONDS:g} s"
            if self._events.poll(50):
                self.follow()

    def follow(self) -> None:
        """Take in the next message."""
        _, number, payload = self.raw()
        if self._last >= 0 and int.from_bytes(number, "big") > self._last + 1:
            self.replay(self._last + 1)
        if int.from_bytes(number, "big") > self._last:
            self._take(number, payload)

    def replay(self, first: int) -> None:
        """Ask for the batches from this number on, and take in the answer."""
        self.num_replays += 1
        self.ask.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self.ask.poll(SECONDS * 1000), "no answer has come"
            _, number, payload = self.ask.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            if int.from_bytes(number, "big") > self._last:
                self._take(number, payload)

    def drained(self, quiet_ms: int = 300) -> None:
        """Take in messages until none has come for a while."""
        while self._events.poll(quiet_ms):
            self.follow()

    def _take(self, number: bytes, payload: bytes) -> None:
        self._last = int.from_bytes(number, "big")
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.num_cleared += 1
                self.held.clear()
                continue
            names = [(event["group_idx"], name) for name in event["block_hashes"]]
            if event["type"] == "BlockRemoved":
                self.held.difference_update(names)
                continue
            assert event["type"] == "BlockStored"
            self.stored.append(event)
            self.held.update(names)
            size = event["block_size"]
            for index, name in enumerate(names):
                self.tokens[name] = event["token_ids"][index * size : (index + 1) * size]
