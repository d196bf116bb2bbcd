"""The listener: addresses, the started line, stopping, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi.responses import StreamingResponse

from quire_engine.contract.errors import ConfigError
from quire_server.http import listener
from quire_server.http.listener import Listening, announce, bind, serve
from support.fakes import exchange, listening, make_app, make_state

pytestmark = pytest.mark.anyio


async def test_port_0_takes_a_free_one_and_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire")
    async with listening(make_app()) as server:
        assert server.port
        assert server.address == f"http://127.0.0.1:{server.port}"
        assert not caplog.messages, "requests may not be served yet"
        announce(server)
        assert f"Uvicorn running on {server.address} (Press CTRL+C to quit)" in caplog.messages
        assert "Application startup complete." in caplog.messages
        async with httpx.AsyncClient(base_url=server.address) as client:
            reply = await client.get("/health")
        assert reply.status_code == 200
        assert "server" not in reply.headers
        assert "date" in reply.headers


async def test_a_taken_port_names_the_setting() -> None:
    async with listening(make_app()) as server:
        with pytest.raises(ConfigError, match="--port"):
            bind(make_state(port=server.port).settings)


async def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        bind(make_state(host="192.0.2.1", port=0).settings)


async def test_nothing_is_accepted_before_the_server_starts() -> None:
    with bind(make_state(port=0).settings) as sock, socket.socket() as client:
        assert client.connect_ex(sock.getsockname()) != 0


async def test_a_unix_socket() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "quire.sock")
        with bind(make_state(uds=path).settings):
            pass  # left behind, as by a killed server
        assert "quire.sock" in os.listdir(folder)
        app = make_app(uds=path)
        async with listening(app) as server:
            assert (server.address, server.port) == (str(path), None)
            with pytest.raises(ConfigError, match="--uds"):
                bind(app.state.quire.settings)
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/nothing")).status_code == 404
        assert os.listdir(folder) == []


async def test_a_file_is_not_mistaken_for_a_stale_socket() -> None:
    with tempfile.NamedTemporaryFile() as file:
        with pytest.raises(ConfigError):
            bind(make_state(uds=Path(file.name)).settings)
        assert os.access(file.name, os.F_OK)


async def test_signals_are_left_to_their_owner() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with listening(make_app()):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_stop_lets_a_reply_finish() -> None:
    app = make_app()
    arrived, go_on = asyncio.Event(), asyncio.Event()

    @app.get("/slow")
    async def slow() -> str:
        arrived.set()
        await go_on.wait()
        return "done"

    settings = app.state.quire.settings.model_copy(update={"port": 0})
    started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, settings, sock=bind(settings), on_started=started.set_result))
    server = await started
    assert server.port is not None
    request = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    asking = asyncio.create_task(exchange(server.port, request))
    await arrived.wait()
    server.stop(False)
    await asyncio.sleep(0.3)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)
    assert not serving.done()
    go_on.set()
    assert b'"done"' in await asking
    await asyncio.wait_for(serving, 300)


async def test_stop_can_cut_replies_off(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def silent() -> AsyncIterator[bytes]:
        try:
            yield b"x"
            arrived.set()
            await asyncio.sleep(60)
        finally:
            ended.set()

    @app.get("/silent")
    async def stream() -> StreamingResponse:
        return StreamingResponse(silent())

    async with listening(app) as server:
        asking = asyncio.create_task(exchange(server.port, b"GET /silent HTTP/1.1\r\nHost: x\r\n\r\n"))
        await arrived.wait()
    assert ended.is_set()
    with contextlib.suppress(ConnectionError):
        assert (await asking).startswith(b"HTTP/1.1 200 ")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_stop_does_not_wait_for_a_reply_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GRACE_SECONDS", 0.1)
    app = make_app()
    arrived, ended = asyncio.Event(), asyncio.Event()

    @app.get("/endless")
    async def endless() -> None:
        try:
            arrived.set()
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async with listening(app) as server:
        asking = asyncio.create_task(exchange(server.port, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"))
        await arrived.wait()
        server.stop(False)
        await asyncio.wait_for(ended.wait(), 300)
    with contextlib.suppress(ConnectionError):
        await asking


async def test_a_client_that_does_not_read_is_dropped() -> None:
    app = make_app(client_write_timeout=0.3)
    ended = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            ended.set()

    @app.get("/endless")
    async def stream() -> StreamingResponse:
        return StreamingResponse(endless())

    async with listening(app) as server:
        _reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 300)
        writer.close()


@pytest.mark.matrix  # as in test_slow_readers.py
async def test_a_slow_but_living_reader_is_not_dropped() -> None:
    app = make_app(client_write_timeout=0.5)
    size = 8 << 20

    @app.get("/large")
    async def large() -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            for _ in range(size // 65536):
                yield b"x" * 65536

        return StreamingResponse(body())

    async with listening(app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /large HTTP/1.0\r\nHost: x\r\n\r\n")
        received = 0
        while chunk := await reader.read(1 << 20):
            received += len(chunk)
            await asyncio.sleep(0.05)
        assert received >= size
        writer.close()
