"""A server under a service manager: ready when it answers, alive while it runs, stopping when it is asked to."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import pytest

from e2e.served import Served

pytestmark = pytest.mark.e2e


def until(manager: socket.socket, begins: str) -> list[str]:
    """The messages up to the first that begins so."""
    found: list[str] = []
    while not found or not found[-1].startswith(begins):
        found.append(manager.recv(4096).decode())
    return found


def test_the_life_of_a_server(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        with Served(env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000000"}) as server:
            start = until(manager, "READY=1")
            assert start[-1].startswith("READY=1\nSTATUS=serving quire-demo on http://127.0.0.1:")
            assert "WATCHDOG=1" in start
            assert any(line.startswith("STATUS=loading: ") for line in start)
            assert httpx.get(f"{server.url}/health").status_code == 200
            until(manager, "WATCHDOG=1")
            server.process.send_signal(signal.SIGTERM)
            assert until(manager, "STOPPING=1")
            assert server.process.wait(60) == 0
