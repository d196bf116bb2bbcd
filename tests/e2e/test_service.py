"""A server under a service manager: ready when it answers, alive while it runs, stopping when it is asked to."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue

import httpx
import pytest

from e2e.served import Served

pytestmark = pytest.mark.e2e


def until(messages: Queue[str], begins: str) -> list[str]:
    """The messages up to the first that begins so."""
    found: list[str] = []
    while not found or not found[-1].startswith(begins):
        found.append(messages.get(timeout=60))
    return found


@contextmanager
def reading(path: Path) -> Iterator[Queue[str]]:
    """What comes to a socket at this path, read as it comes: a socket itself holds ten messages."""
    messages: Queue[str] = Queue()
    over = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(0.2)

        def read() -> None:
            while not over.is_set():
                with suppress(TimeoutError):
                    messages.put(manager.recv(4096).decode())

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield messages
        finally:
            over.set()
            thread.join()


def test_the_life_of_a_server(tmp_path: Path) -> None:
    notified = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000000"}
    with reading(tmp_path / "notify") as manager, Served(env=notified) as server:
        start = until(manager, "READY=1")
        assert start[-1].startswith("READY=1\nSTATUS=serving quire-demo on http://127.0.0.1:")
        assert "WATCHDOG=1" in start
        assert any(line.startswith("STATUS=loading: ") for line in start)
        assert httpx.get(f"{server.url}/health").status_code == 200
        until(manager, "WATCHDOG=1")
        server.process.send_signal(signal.SIGTERM)
        assert until(manager, "STOPPING=1")
        assert server.process.wait(60) == 0
