"""Accepting where no file can be opened for a while, and what is dropped at the end."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

import pytest

from quire_server.http import acceptor
from quire_server.http.acceptor import Acceptor
from quire_server.http.turns import Turns


class _Listening(socket.socket):
    """A listening socket of a process that may open no file for the next `failures` times."""

    failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class _Opened(asyncio.Protocol):
    def __init__(self, made: asyncio.Queue[bool], has_turn: bool) -> None:
        self._made, self._has_turn = made, has_turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._made.put_nowait(self._has_turn)


class _TakenTurns(Turns):
    """Turns that others have, all of them."""

    def is_free(self) -> bool:
        return False

    def give(self) -> None:
        """Give a turn to who has waited longest."""
        self._new.popleft()()


async def _accepting(listening: socket.socket, turns: Turns) -> tuple[Acceptor, asyncio.Queue[bool]]:
    listening.bind(("127.0.0.1", 0))
    made: asyncio.Queue[bool] = asyncio.Queue()
    found = Acceptor(listening, lambda has_turn: _Opened(made, has_turn), turns=turns, tls=None, most_waiting=10)
    found.begin()
    return found, made


def test_it_is_tried_again_where_no_file_can_be_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_SECONDS", 0.001)

    async def run() -> None:
        with _Listening() as listening:
            accepting, made = await _accepting(listening, Turns())
            with socket.create_connection(listening.getsockname()):
                assert not await asyncio.wait_for(made.get(), 60)
            accepting.close()
            await accepting.wait_closed()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be accepted: Too many open files"
    ] * 2


def test_a_turn_that_comes_while_no_file_can_be_opened_does_not_try_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_SECONDS", 3600.0)

    async def run() -> None:
        turns = _TakenTurns()
        with _Listening() as listening:
            listening.failures = 0
            accepting, made = await _accepting(listening, turns)
            with socket.create_connection(listening.getsockname()) as first:
                first.sendall(b"POST / HTTP/1.1\r\n")
                while not turns.num_waiting:  # noqa: ASYNC110 - a few turns of the loop
                    await asyncio.sleep(0)
                listening.failures = 5
                with socket.create_connection(listening.getsockname()):
                    while listening.failures == 5:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                    turns.give()
                    assert await made.get()
                    for _ in range(5):
                        await asyncio.sleep(0.001)
                    assert listening.failures == 4
                    accepting.close()
                    await accepting.wait_closed()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert len(caplog.records) == 1


def test_who_waits_is_dropped_at_the_end() -> None:
    async def run() -> None:
        turns = _TakenTurns()
        with socket.socket() as listening:
            accepting, made = await _accepting(listening, turns)
            with socket.create_connection(listening.getsockname()) as client:
                client.sendall(b"POST / HTTP/1.1\r\n")
                while not turns.num_waiting:  # noqa: ASYNC110 - a few turns of the loop
                    await asyncio.sleep(0)
                accepting.close()
                await asyncio.sleep(0)
                await accepting.wait_closed()
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
            assert made.empty()

    asyncio.run(run())
