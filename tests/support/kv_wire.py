"""A wire between two engines that pass KV blocks on, with what may happen to it: slow, cut off, a byte flipped.

A thread for each direction of each connection; the wire listens on 127.0.0.1.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType


class KVWire:
    """`with KVWire(address) as wire: ... wire.address`. The fields may be changed at any time."""

    def __init__(self, target: str) -> None:
        """`target`: HOST:PORT of the engine that lends."""
        self.target = target
        self.bytes_per_second = 0.0  # of what comes from the target; 0: as fast as it comes
        self.flip_at = -1  # the byte from the target, counted over all connections, that is flipped
        self.stop_at = -1  # the byte from the target, counted so, from which on nothing is passed on
        self.num_bytes = 0  # that have come from it
        self.num_connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> KVWire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """End all connections."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self.num_connections += 1
            host, _, port = self.target.rpartition(":")
            try:
                far = socket.create_connection((host, int(port)), timeout=300)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._open += [near, far]
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=(source, sink, is_answer), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 14)):
                if is_answer:
                    at = self.flip_at - self.num_bytes
                    if 0 <= at < len(data):
                        data[at] ^= 1
                    left = self.stop_at - self.num_bytes
                    self.num_bytes += len(data)
                    if self.stop_at >= 0:
                        del data[max(0, left) :]
                    if self.bytes_per_second:
                        time.sleep(len(data) / self.bytes_per_second)
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
