"""Clients that do not read their streams: what is made for them, what waits, when they are cut off."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest

from quire_lab.commands.diagnosis.causes import diagnose
from quire_lab.commands.diagnosis.scrapes import Window, read_scrape
from quire_lab.simulation.slo import parse_slo
from support.fake_engine import FakeEngine
from support.fakes import listening, make_app, make_state

pytestmark = pytest.mark.anyio

MOST_TOKENS = 1200  # of two kilobytes each
STREAM = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": MOST_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}
SLOW = {"max_model_len": 1500, "stream_buffer_tokens": 16}


async def until(condition: Callable[[], bool], patience: float = 300.0) -> None:
    async with asyncio.timeout(patience):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def ask(port: int | None) -> socket.socket:
    """A stream that nobody reads yet."""
    assert port is not None
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    body = json.dumps(STREAM).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    await loop.sock_sendall(sock, head % len(body) + body)
    return sock


async def read_on(
    sock: socket.socket, enough: Callable[[bytes], bool], *, piece: int = 1 << 16, pause: float = 0.0
) -> bytes:
    received = b""
    async with asyncio.timeout(300):
        while not enough(received):
            got = await asyncio.get_running_loop().sock_recv(sock, piece)
            if not got:
                break
            received += got
            await asyncio.sleep(pause)
    return received


async def test_a_stream_that_is_not_read_takes_no_steps_and_goes_on_when_it_is() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, **SLOW)
    async with listening(make_app(state)) as server:
        sock = await ask(server.port)
        await until(lambda: bool(engine.held))
        made = engine.step_id
        await asyncio.sleep(0.1)
        assert engine.step_id == made, "it is set aside"
        assert server.bytes_waiting() > 0
        assert made < MOST_TOKENS / 3
        assert state.client.refusal() is None
        received = await read_on(sock, lambda got: got.endswith(b"0\r\n\r\n"))
        assert received.count(b'"top_logprobs":') == engine.step_id == MOST_TOKENS, "every token came, once"
        assert not engine.held
        assert engine.num_holds >= 1
        sock.close()
        assert server.bytes_waiting() == 0


async def test_a_held_stream_leaves_its_place_in_the_queue_to_others() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, **SLOW, max_queued_sequences=1)
    async with listening(make_app(state)) as server:
        engine.hold()  # on a busy machine the stream is held before it is seen to be live
        sock = await ask(server.port)
        await until(lambda: bool(engine.live))
        assert state.client.refusal() is not None
        engine.release()
        await until(lambda: bool(engine.held))
        assert state.client.refusal() is None
        sock.close()
        await until(lambda: not engine.live)
        assert state.client.in_flight == 0
        assert state.client.refusal() is None


async def test_who_takes_nothing_is_cut_off_in_time() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, **SLOW, client_write_timeout=0.5)
    async with listening(make_app(state)) as server:
        sock = await ask(server.port)
        await until(lambda: bool(engine.held))
        await until(lambda: not engine.live)
        with pytest.raises(ConnectionResetError):
            await read_on(sock, lambda _: False)
        sock.close()
        assert state.client.in_flight == 0


@pytest.mark.matrix  # waits for whole windows
async def test_too_little_in_a_window_is_too_little() -> None:
    """A busy machine only makes this client slower; how much is enough is for the tests of WriteClock."""
    engine = FakeEngine()
    state = make_state(engine=engine, **SLOW, client_write_timeout=0.5, client_min_rate=40_000)
    async with listening(make_app(state)) as server:
        sock = await ask(server.port)
        await until(lambda: bool(engine.held))
        with pytest.raises(ConnectionResetError):
            await read_on(sock, lambda _: False, piece=100, pause=0.05)
        sock.close()
        await until(lambda: not engine.live)


async def test_a_reply_that_is_gathered_is_never_held() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, max_model_len=1500, stream_buffer_tokens=1)
    async with listening(make_app(state)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps({**STREAM, "stream": False, "max_tokens": 400}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b'"completion_tokens":400' in await reader.read()
        writer.close()
        assert engine.num_holds == 0


async def test_a_client_that_does_not_read_is_the_doctors_cause() -> None:
    """A slow client is injected; the metrics of the server that has it name the network."""
    engine = FakeEngine()
    state = make_state(engine=engine, **SLOW)
    async with listening(make_app(state)) as server:
        state.metrics.bytes_waiting, state.metrics.num_stalled = server.bytes_waiting, server.num_stalled
        quiet = read_scrape(state.metrics.render().decode(), 0.0)
        sock = await ask(server.port)
        await until(lambda: server.num_stalled() == 1)
        stalled = [read_scrape(state.metrics.render().decode(), at) for at in (1.0, 2.0)]
        (cause,) = diagnose(Window(stalled), parse_slo("ttft_p95=2s")).causes
        assert "network" in cause.name
        assert "1.0 connections wait for their clients to read" in cause.numbers
        assert diagnose(Window([quiet, quiet]), parse_slo("ttft_p95=2s")).causes == ()
        sock.close()
        await until(lambda: server.num_stalled() == 0)
