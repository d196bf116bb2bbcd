"""Publishes one engine's KV events over ZeroMQ, as vLLM does: (topic, number, batch), with a replay beside it.

Owns a thread and its sockets. Promises: the event loop never waits for a subscriber; a subscriber that applies what it
gets in order, and asks for a replay after a gap, has the blocks that the engine has. A replay that begins before what
is kept, or that comes after batches were passed over, is one batch with everything.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import zmq

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import CacheEvent
from quire_server.engine.kv_events.events import (
    AllBlocksCleared,
    KnownBlocks,
    KVEventBatch,
    KVEventsConfig,
    PoolShape,
    WireEvent,
    whole,
)

_END = (-1).to_bytes(8, "big", signed=True)  # the number of the message after the last one of a replay
_LINGER_MS = 200  # for the last messages
_JOIN_SECONDS = 2.0
_LEAST_HWM = 1000

log = logging.getLogger("quire.events")


class _Stop:
    """The last entry of the queue."""


_Entry = PoolShape | tuple[CacheEvent, ...] | None | _Stop  # a new engine; its events; its end; the end of all


class Publisher:
    """A `CacheListener` with a thread of its own."""

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """Raises ConfigError for an endpoint that cannot be had. `rank`: of the engine among its server's."""
        self._config, self._rank = config, rank
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, "endpoint", config.endpoint, config.hwm, binds=_is_bound(config.endpoint))
            end, most = config.replay_endpoint, max(config.buffer_steps, _LEAST_HWM) + 2
            self._replay = None if end is None else self._socket(zmq.ROUTER, "replay_endpoint", end, most, binds=True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._queue: deque[_Entry] = deque()
        self._woken, self._waker = socket.socketpair()
        for each in (self._woken, self._waker):
            each.setblocking(False)
        self._known = KnownBlocks()
        self._shape: PoolShape | None = None  # of the latest engine
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0  # of the next batch
        self._encode = msgspec.msgpack.Encoder().encode
        log.info("KV events of engine %d are published at %s", rank, config.endpoint)
        if _is_open(config.endpoint) or (config.replay_endpoint and _is_open(config.replay_endpoint)):
            log.warning("whoever reaches the endpoints of --kv-events-config can read the tokens of all prompts")
        self._thread = threading.Thread(target=self._run, name=f"kv-events-{rank}", daemon=True)
        self._thread.start()

    def begins(self, plan: EnginePlan) -> None:
        self._put(PoolShape.of(plan))

    def changes(self, events: Sequence[CacheEvent]) -> None:
        self._put(tuple(events))

    def ends(self) -> None:
        self._put(None)

    def close(self) -> None:
        if self._thread.is_alive():
            self._put(_Stop())
            self._thread.join(_JOIN_SECONDS)

    def _put(self, entry: _Entry) -> None:
        if not self._thread.is_alive():  # it has failed: nobody would take the entry
            return
        self._queue.append(entry)
        with suppress(BlockingIOError):  # woken already
            self._waker.send(b"\0")

    def _socket(self, kind: int, name: str, endpoint: str, hwm: int, *, binds: bool) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.set_hwm(hwm)
        made.setsockopt(zmq.IPV6, int("::" in endpoint))
        try:
            (made.bind if binds else made.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"--kv-events-config: {name} {endpoint}: {error.strerror}") from None
        return made

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._woken.fileno() in ready:
                    with suppress(BlockingIOError):
                        self._woken.recv(1 << 16)
                    if not self._drain():
                        return
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
        except Exception:  # a bug: the server goes on without events
            log.exception("KV events are published no more")
            self._queue.clear()
        finally:
            self._context.destroy(linger=_LINGER_MS)
            self._woken.close()

    def _drain(self) -> bool:
        """Publish what waits; False after the last of it."""
        is_late = len(self._queue) > self._config.max_queue_size
        while self._queue:
            entry = self._queue.popleft()
            if isinstance(entry, _Stop):
                return False
            if isinstance(entry, tuple):
                for event in entry:
                    self._known.apply(event)
                if not is_late and self._shape is not None:
                    self._publish(list(map(self._shape.wire, entry)))
                continue
            self._known.clear()
            self._shape = entry or self._shape
            if entry is None and not is_late:
                self._publish([AllBlocksCleared()])
        if is_late:
            log.warning("KV events came faster than they could be published: subscribers get all blocks anew")
            self._publish(whole(self._known, self._shape))
        return True

    def _publish(self, events: list[WireEvent]) -> None:
        payload = self._payload(events)
        self._pub.send_multipart([self._config.topic.encode(), self._number.to_bytes(8, "big"), payload])
        self._kept.append((self._number, payload))
        self._number += 1

    def _payload(self, events: list[WireEvent]) -> bytes:
        return self._encode(KVEventBatch(ts=time.time(), events=events, data_parallel_rank=self._rank))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send what one subscriber has missed: all batches from a number on, or everything as the last of them."""
        peer, *rest = replay.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            log.debug("a request for a replay is no number of 8 bytes")
            return
        first = int.from_bytes(rest[1], "big")
        if first >= (self._kept[0][0] if self._kept else self._number):
            found = [each for each in self._kept if each[0] >= first]
        else:
            found = [(self._number - 1, self._payload(whole(self._known, self._shape)))]
        for number, payload in found:
            replay.send_multipart([peer, b"", number.to_bytes(8, "big"), payload])
        replay.send_multipart([peer, b"", _END, b""])


def _is_bound(endpoint: str) -> bool:
    """Whether a publisher waits there for subscribers; else it connects to one that waits for publishers."""
    return "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")


def _is_open(endpoint: str) -> bool:
    """Whether other machines can reach it."""
    return endpoint.startswith("tcp://") and not endpoint.startswith(("tcp://127.", "tcp://[::1]", "tcp://localhost"))
