"""What a service manager is told, over a socket of its own, and that its absence is no trouble."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quire_server.programs.service_manager import service_manager
from quire_server.settings.sources import NotifyAddress, notify_address

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@pytest.fixture(autouse=True)
def _no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    name = f"@quire-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0"))
        sock.settimeout(300)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield sock


def run(progress: Callable[[], str], *, beats: float = 0.0) -> None:
    async def server() -> None:
        stop = asyncio.get_running_loop().create_future()
        async with service_manager(stop, progress) as told:
            await asyncio.sleep(beats)
            told.ready("serving")
            stop.set_result(None)
            await asyncio.sleep(0)

    asyncio.run(server())


def received(sock: socket.socket, last: str) -> list[str]:
    """All messages up to the first that begins with `last`."""
    found: list[str] = []
    while not found or not found[-1].startswith(last):
        found.append(sock.recv(4096).decode())
    return found


def test_a_life(manager: socket.socket) -> None:
    run(lambda: "loading: weights, 40 %", beats=0.01)
    assert received(manager, "STOPPING") == [
        "STATUS=loading: weights, 40 %",
        "READY=1\nSTATUS=serving",
        "STOPPING=1\nSTATUS=stopping: requests that were accepted may finish",
    ]


def test_signs_of_life_come_twice_in_the_watchdog_s_time(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    run(lambda: "loading", beats=0.06)  # a socket holds ten messages
    found = received(manager, "STOPPING")
    assert found.count("WATCHDOG=1") > 1
    assert found.count("STATUS=loading") == 1


def block() -> None:
    """What nothing may do on an event loop."""
    time.sleep(0.2)


def test_a_stuck_event_loop_gives_none(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1000")

    async def server() -> None:
        async with service_manager(asyncio.get_running_loop().create_future(), lambda: "loading"):
            await asyncio.sleep(0)
            block()

    asyncio.run(server())
    manager.setblocking(False)
    found = []
    while True:
        try:
            found.append(manager.recv(4096))
        except BlockingIOError:
            break
    assert found == [b"WATCHDOG=1", b"STATUS=loading"]


def test_a_full_socket_delays_what_must_arrive(manager: socket.socket) -> None:
    async def server() -> None:
        async with service_manager(asyncio.get_running_loop().create_future(), lambda: "loading") as told:
            while not told._waiting:
                told.ready("serving")  # until the socket has no room
            manager.setblocking(False)
            with suppress(BlockingIOError):
                while manager.recv(4096):
                    pass
            told.again()
            assert manager.recv(4096) == b"READY=1\nSTATUS=serving"
            told.again()
            with pytest.raises(BlockingIOError):  # it is sent once
                manager.recv(4096)

    asyncio.run(server())


def test_without_one_nothing_is_sent_or_started() -> None:
    async def server() -> None:
        before = asyncio.all_tasks()
        async with service_manager(asyncio.get_running_loop().create_future(), lambda: "") as told:
            told.ready("serving")
            assert asyncio.all_tasks() == before

    asyncio.run(server())


def test_one_that_is_gone_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    with caplog.at_level(logging.WARNING, logger="quire"):
        run(lambda: "loading", beats=0.01)
    assert [record.getMessage() for record in caplog.records] == [
        f"the service manager at {tmp_path}/gone cannot be reached: No such file or directory"
    ]


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": "vsock:2:9"}, None),
        ({"NOTIFY_SOCKET": "/run/n"}, NotifyAddress(path="/run/n", watchdog_seconds=None)),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "3000000"}, NotifyAddress(path="@n", watchdog_seconds=3.0)),
        (
            {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"},
            NotifyAddress(path="@n", watchdog_seconds=None),
        ),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "soon"}, NotifyAddress(path="@n", watchdog_seconds=None)),
    ],
)
def test_its_variables(
    variables: dict[str, str], address: NotifyAddress | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert notify_address() == address
