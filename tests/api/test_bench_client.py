"""The client of `quire bench` against servers of other makers and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from quire_bench.client import Client
from quire_bench.records import Record
from quire_bench.servers import BenchError, discover
from support.fakes import listening, make_app, make_state

pytestmark = pytest.mark.anyio
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b'data: {"choices":[{"text":"a"}]}'


def framed(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


@contextlib.asynccontextmanager
async def peer(*replies: bytes | None, then_close: bool = True) -> AsyncIterator[str]:
    """Answers each request with the next of `replies` (None: silence), then closes the connection or keeps it."""
    waiting = list(replies)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
                await reader.readexactly(length)
                reply = waiting.pop(0)
                if reply is None:
                    await asyncio.sleep(60)
                else:
                    writer.write(reply)
                if then_close:
                    break
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
    finally:
        server.close()


async def exchanged(url: str, *, patience: float = 300.0, requests: int = 1) -> list[Record]:
    client = Client(url, timeout=patience)
    records = [Record(due=0.0, input_tokens=7, asked_tokens=2) for _ in range(requests)]
    try:
        for record in records:
            await client.send(b"{}", record)
    finally:
        client.close()
    return records


DONE_PART = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":3}}\n\n'


@pytest.mark.parametrize(
    ("parts", "chunks", "tokens"),
    [
        ((CHUNK + b"\n\n", CHUNK + b"\n\n", DONE_PART), 2, (7, 2)),  # no usage: as asked
        ((CHUNK + b"\n\n", USAGE, DONE_PART), 1, (8, 3)),
        ((CHUNK + b"\n\n" + CHUNK + b"\n\n" + USAGE + DONE_PART,), 2, (8, 3)),
        ((CHUNK[:9], CHUNK[9:], b"\n", b"\n" + CHUNK + b"\n", b"\ndata: [DO", b"NE]\n\n"), 2, (7, 2)),
        (
            (CHUNK + b"\r\n\r\n", b": ping\r\n\r\n", b"event: x\r\n" + CHUNK + b"\r\n\r\n", b"data: [DONE]\r\n\r\n"),
            2,
            (7, 2),
        ),
        ((CHUNK.replace(b"data: ", b"data:") + b"\n\n", b"data: [DONE]\n\n"), 1, (7, 2)),
        ((CHUNK[:-1] + b',"usage":null}\n\n', DONE_PART), 1, (7, 2)),
        ((CHUNK[:-1] + b',"usage": {"prompt_tokens": 8, "completion_tokens": 1}}\n\n', DONE_PART), 1, (8, 1)),
        ((CHUNK.replace(b'"a"', b'"\\"error\\" \\"usage\\""') + b"\n\n", DONE_PART), 1, (7, 2)),
    ],
)
async def test_streams_of_other_servers(parts: tuple[bytes, ...], chunks: int, tokens: tuple[int, int]) -> None:
    async with peer(HEAD + framed(*parts) + b"0\r\n\r\n") as url:
        (record,) = await exchanged(url)
    assert (record.outcome, record.detail) == ("ok", "")
    assert len(record.arrivals) == chunks
    assert (record.input_tokens, record.output_tokens) == tokens


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (HEAD + framed(CHUNK + b"\n\n"), "broken"),  # cut off
        (HEAD + framed(CHUNK + b"\n\n") + b"0\r\n\r\n", "broken"),  # ended without [DONE]
        (HEAD + framed(DONE_PART) + b"0\r\n\r\n", "broken"),  # nothing came
        (HEAD + framed(b'data: {"error":{"message":"no"}}\n\n', DONE_PART) + b"0\r\n\r\n", "error_event"),
        (HEAD + framed(b'data: {"usage"\n\n', DONE_PART) + b"0\r\n\r\n", "error_event"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", "http_503"),
        (b"HTTP/1.1 500 Oops\r\n\r\nwhat", "http_500"),
        (b"hello\r\n\r\n", "broken"),
        (b"", "broken"),
    ],
)
async def test_whatever_a_server_does_is_a_record(reply: bytes, outcome: str) -> None:
    async with peer(reply) as url:
        (record,) = await exchanged(url)
    assert record.outcome == outcome
    assert record.detail
    assert record.ended > 0


async def test_silence_times_out() -> None:
    async with peer(None) as url:
        (record,) = await exchanged(url, patience=0.2)
    assert record.outcome == "timeout"


async def test_nobody_there() -> None:
    async with peer() as url:
        pass
    (record,) = await exchanged(url)
    assert record.outcome == "unreachable"


async def test_an_idle_connection_that_was_closed_is_nobodys_failure() -> None:
    good = HEAD + framed(CHUNK + b"\n\n", DONE_PART) + b"0\r\n\r\n"
    async with peer(good, good, then_close=True) as url:
        records = await exchanged(url, requests=2)
    assert [record.outcome for record in records] == ["ok", "ok"]


async def test_a_slow_answer_is_not_asked_for_twice() -> None:
    good = HEAD + framed(CHUNK + b"\n\n", DONE_PART) + b"0\r\n\r\n"
    async with peer(good, None, good, then_close=False) as url:
        records = await exchanged(url, requests=3, patience=0.3)
    assert [record.outcome for record in records] == ["ok", "timeout", "ok"]


async def test_servers_that_cannot_be_measured() -> None:
    async with peer() as url:
        pass
    with pytest.raises(BenchError, match="does not answer"):
        await discover(url, None, api_key=None, model=None)
    with pytest.raises(BenchError, match="expected an address"):
        await discover("localhost:8000", None, api_key=None, model=None)
    async with listening(make_app(make_state(api_key=("k",)))) as listener:
        with pytest.raises(BenchError, match="401"):
            await discover(listener.address, None, api_key=None, model=None)
        assert (await discover(listener.address, None, api_key="k", model=None)).model == "fake"
