"""A client that stops speaking gets its answer; one that leaves ends its work at once. Both look alike at first."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from api.test_disconnect import until
from quire_server.http import connection
from support.covering import few
from support.fake_engine import FakeEngine
from support.fakes import listening, make_app, make_state

pytestmark = pytest.mark.anyio

STEP = 0.02


@pytest.fixture(params=few(["asyncio", "uvloop"], "uvloop"))
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    if request.param == "uvloop" and find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


def request_bytes(
    *, stream: bool = False, tokens: int = 12, version: str = "1.1", path: str = "/v1/completions"
) -> bytes:
    asked = {"prompt": "a", "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def rest(self) -> bytes:
        async with asyncio.timeout(300):
            return await self.reader.read()

    def close(self) -> None:
        """As a process that ends: the whole socket, at once."""
        self.writer.transport.abort() if self.reader.at_eof() else self.writer.close()


async def connect_to(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port))


def without_interim(raw: bytes) -> bytes:
    while raw.startswith(connection.PROBE):
        raw = raw[len(connection.PROBE) :]
    return raw


@pytest.fixture
async def served() -> AsyncIterator[tuple[FakeEngine, int]]:
    engine = FakeEngine(step_seconds=STEP)
    async with listening(make_app(make_state(engine=engine))) as server:
        yield engine, server.port or 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_step", [0, 3])
async def test_who_stops_speaking_gets_the_answer(served, stream: bool, at_step: int) -> None:
    engine, port = served
    client = await connect_to(port)
    client.writer.write(request_bytes(stream=stream))
    await until(lambda: engine.step_id >= at_step)
    client.writer.write_eof()
    raw = without_interim(await client.rest())  # ends: the server closes after the reply
    client.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert (b"data: [DONE]" in body) if stream else (json.loads(body)["usage"]["completion_tokens"] == 12)
    assert b"HTTP/1.1" not in body
    assert engine.aborted == []


async def test_short_replies_need_no_probe(served) -> None:
    _, port = served
    client = await connect_to(port)
    client.writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    client.writer.write_eof()
    raw = await client.rest()
    client.close()
    assert without_interim(raw).startswith(b"HTTP/1.1 200")


async def test_a_client_library_passes_the_probe_over(served) -> None:
    _, port = served

    def ask() -> tuple[int, object]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        body = json.dumps({"prompt": "a", "max_tokens": 12, "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.sock.shutdown(socket.SHUT_WR)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())["usage"]["completion_tokens"]

    assert await asyncio.to_thread(ask) == (200, 12)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_step", [0, 3])
async def test_who_leaves_ends_the_work(served, stream: bool, at_step: int) -> None:
    engine, port = served
    client = await connect_to(port)
    client.writer.write(request_bytes(stream=stream, tokens=400))
    await until(lambda: len(engine.submitted) == 1 and engine.step_id >= at_step)
    client.close()
    left_at = engine.step_id
    await until(lambda: not engine.live)
    assert len(engine.aborted) == 1
    assert engine.step_id - left_at <= 3  # the reset's way, and for a stream the chunk that it answers


async def test_who_leaves_while_waiting_ends_the_wait(served) -> None:
    """Nothing is written to who waits, so only the probe can find out."""
    engine, port = served
    engine.hold()
    clients = [await connect_to(port) for _ in range(2)]
    for client, stream in zip(clients, (False, True), strict=True):
        client.writer.write(request_bytes(stream=stream, tokens=400))
    await until(lambda: len(engine.submitted) == 2)
    for client in clients:
        client.close()
    await until(lambda: not engine.live)
    assert len(engine.aborted) == 2


async def test_who_stops_speaking_and_leaves_later(served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBE_SECONDS", 0.2)
    engine, port = served
    engine.hold()
    client = await connect_to(port)
    client.writer.write(request_bytes(tokens=400))
    await until(lambda: len(engine.submitted) == 1)
    client.writer.write_eof()
    await asyncio.sleep(0.5)
    assert engine.live  # it still listens
    client.writer.transport.abort()
    await until(lambda: not engine.live)
    assert len(engine.aborted) == 1


async def test_http_1_0_has_no_probe_so_its_end_is_a_leaving(served) -> None:
    engine, port = served
    client = await connect_to(port)
    client.writer.write(request_bytes(version="1.0", tokens=400))
    await until(lambda: len(engine.submitted) == 1)
    client.writer.write_eof()
    await until(lambda: not engine.live)
    assert connection.PROBE not in await client.rest()
    client.close()
    assert len(engine.aborted) == 1


async def test_requests_sent_at_once_are_all_answered(served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBE_SECONDS", STEP)
    engine, port = served
    client = await connect_to(port)
    client.writer.write(request_bytes() + request_bytes(stream=True) + request_bytes())
    client.writer.write_eof()
    raw = re.sub(b"(%s)+(?=HTTP/1.1 200)" % re.escape(connection.PROBE), b"", await client.rest())
    client.close()
    assert raw.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert raw.count(b"data: [DONE]") == 1
    assert connection.PROBE not in raw  # none within a reply
    assert engine.aborted == []


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", request_bytes()[:-5]])
async def test_half_a_request_is_not_waited_for(served, sent: bytes) -> None:
    engine, port = served
    client = await connect_to(port)
    client.writer.write(sent)
    await asyncio.sleep(0.05)
    client.writer.write_eof()
    assert await client.rest() == b""
    client.close()
    assert engine.submitted == []


@pytest.mark.parametrize("leaves", [False, True])
async def test_unix_sockets_too(tmp_path: Path, leaves: bool) -> None:
    engine = FakeEngine(step_seconds=STEP)
    path = tmp_path / "s"
    async with listening(make_app(make_state(engine=engine, uds=path))):
        client = Client(*await asyncio.open_unix_connection(str(path)))
        client.writer.write(request_bytes(tokens=400 if leaves else 12))
        await until(lambda: len(engine.submitted) == 1)
        if leaves:
            client.close()
            await until(lambda: not engine.live)
            assert len(engine.aborted) == 1
        else:
            client.writer.write_eof()
            assert without_interim(await client.rest()).startswith(b"HTTP/1.1 200")
            client.close()


async def test_the_connection_is_gone_afterwards(served) -> None:
    """Nothing is left behind: no timer, no open socket."""
    engine, port = served
    for leaves in (False, True):
        client = await connect_to(port)
        client.writer.write(request_bytes())
        client.writer.write_eof()
        if leaves:
            client.writer.transport.abort()
        else:
            await client.rest()
            client.close()
    await until(lambda: not engine.live)
    import psutil

    def server_side() -> list[object]:
        connections = psutil.Process().net_connections("tcp")
        return [one for one in connections if one.laddr.port == port and one.status != psutil.CONN_LISTEN]

    await until(lambda: not server_side())
