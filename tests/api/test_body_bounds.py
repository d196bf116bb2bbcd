"""What nobody may take by sending much: the loop's time, memory, connections. Refused before it is read or built."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from quire_server.http import body
from quire_server.http.body_limits import FREE_BYTES, LEAST_BODY
from support.fakes import connect, exchange, listening, make_app, parse_reply

pytestmark = pytest.mark.anyio

JSON = b"Content-Type: application/json\r\n"
MIB = 1 << 20


def head(path: str, *lines: bytes) -> bytes:
    return (
        b"POST "
        + path.encode()
        + b" HTTP/1.1\r\nHost: x\r\n"
        + JSON
        + b"".join(b"%b\r\n" % each for each in lines)
        + b"\r\n"
    )


@contextlib.asynccontextmanager
async def held(port: int, path: str, declared: int, sent: int) -> AsyncIterator[asyncio.StreamReader]:
    """A request of which so much of the body has been sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(path, b"Content-Length: %d" % declared) + b" " * sent)
        await writer.drain()
        await asyncio.sleep(0.1)
        yield reader
    finally:
        writer.close()


async def body_bytes(client: httpx.AsyncClient) -> float:
    found = re.search(r"^quire_http_body_bytes\S* (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("declared", [b"Content-Length: 8388608", b"Transfer-Encoding: chunked"])
async def test_who_has_no_key_is_answered_before_the_body(declared: bytes) -> None:
    async with listening(make_app(api_key=("key",))) as server:
        reply = parse_reply(await exchange(server.port, head("/v1/completions", declared)))
        assert reply.status_code == 401
        assert reply.headers["connection"] == "close"


async def test_who_has_no_key_keeps_the_connection_where_little_is_to_come() -> None:
    async with (
        listening(make_app(api_key=("key",))) as server,
        httpx.AsyncClient(base_url=server.address) as client,
    ):
        for _ in range(2):
            reply = await client.post("/v1/completions", json={"prompt": "a"})
            assert (reply.status_code, "connection" in reply.headers) == (401, False)


async def test_the_limit_follows_from_the_context() -> None:
    async with connect(make_app(max_model_len=512)) as client:
        for sent in ({"content": b" " * MIB}, {"content": _pieces(MIB)}):
            reply = await client.post("/v1/completions", headers={"content-type": "application/json"}, **sent)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "context_length_exceeded")
            assert reply.headers["connection"] == "close"
        reply = await client.post("/v1/messages", content=b" " * MIB, headers={"content-type": "application/json"})
        assert reply.json()["error"]["message"].startswith("prompt is too long: ")
        long = json.dumps({"prompt": "a", "unknown": "x" * LEAST_BODY})
        reply = await client.post("/v1/completions", content=long, headers={"content-type": "application/json"})
        assert reply.status_code == 200
        reply = await client.post("/v1/embeddings", json={"input": ["x" * 1000] * 2000})
        assert reply.json()["error"]["code"] != "payload_too_large"
        assert reply.status_code == 400  # each text is too long, and is said to be


async def _pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size >> 16):
        yield b" " * (1 << 16)


async def test_the_document_names_the_limits() -> None:
    document = make_app(max_model_len=2048).openapi()
    said = document["paths"]["/v1/completions"]["post"]["requestBody"]["description"]
    assert str(3 << 19) in said


async def test_bodies_that_find_no_room_are_503_and_small_ones_find_it() -> None:
    app = make_app(max_body_bytes=MIB, max_body_bytes_total=2 * MIB, body_timeout=600)
    async with listening(app) as server, httpx.AsyncClient(base_url=server.address) as client:
        async with held(server.port, "/tokenize", MIB, MIB - 1), held(server.port, "/tokenize", MIB, MIB - 1):
            assert await body_bytes(client) == 2 * (MIB - 1)
            reply = await client.post("/tokenize", json={"prompt": "x" * 2 * FREE_BYTES})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "too_many_body_bytes")
            assert 1 <= int(reply.headers["retry-after"]) <= 30
            async with held(server.port, "/tokenize", MIB, FREE_BYTES) as reader:  # is refused by its head
                assert b" 503 " in await asyncio.wait_for(reader.readline(), 300)
            assert (await client.post("/tokenize", json={"prompt": "small"})).status_code == 200
        await asyncio.sleep(0.2)
        reply = await client.post("/tokenize", json={"prompt": "x" * 2 * FREE_BYTES})
        assert reply.status_code == 200
        assert await body_bytes(client) == 0


async def test_what_is_refused_while_it_arrives_makes_room() -> None:
    app = make_app(max_body_bytes=MIB, max_body_bytes_total=2 * MIB, body_timeout=600)
    async with (
        listening(app) as server,
        httpx.AsyncClient(base_url=server.address) as client,
        held(server.port, "/tokenize", MIB, MIB * 3 // 4),
        held(server.port, "/tokenize", MIB, MIB * 3 // 4),
    ):
        chunked = head("/tokenize", b"Transfer-Encoding: chunked")
        size = MIB * 3 // 4
        raw = await exchange(server.port, chunked + b"%x\r\n" % size + b" " * size + b"\r\n0\r\n\r\n")
        assert parse_reply(raw).status_code == 503
        reply = await client.post("/tokenize", json={"prompt": "x" * (MIB // 4)})
        assert reply.status_code == 200


async def test_large_bodies_are_read_elsewhere_and_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    parse = body.parse_pieces

    def noted(*args: object, **options: object) -> object:
        threads.append(threading.current_thread())
        return parse(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(body, "parse_pieces", noted)
    async with connect(make_app()) as client:
        for size in (10, 100_000, 300_000):
            reply = await client.post("/tokenize", json={"prompt": "é" * size})
            assert reply.json()["count"] == 2 * size
        for broken, code in (
            ({"prompt": "a" * 20_000, "tokens": 1, "messages": 1}, "invalid_value"),
            ([1] * 20_000, "invalid_json"),
        ):
            reply = await client.post("/tokenize", json=broken)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
    assert len(threads) == 4
    assert threading.main_thread() not in threads


async def test_too_many_values_are_refused() -> None:
    async with connect(make_app(max_body_bytes=MIB)) as client:
        for raw in (b'{"tokens":[' + b"1," * 350_000 + b"1]}", b'{"tokens":[' + b"[]," * 40_000 + b"1]}"):
            reply = await client.post("/detokenize", content=raw, headers={"content-type": "application/json"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_values")


async def test_an_id_far_behind_in_a_list_is_named() -> None:
    async with connect(make_app(max_body_bytes=MIB)) as client:
        for wrong in (1.5, True, "1"):
            reply = await client.post("/detokenize", json={"tokens": [1] * 40_000 + [wrong, wrong]})
            assert reply.json()["error"]["param"] == "tokens[40000]"


async def test_who_leaves_while_a_body_is_read_frees_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started, has_stopped = threading.Event(), threading.Event()

    def endless(*_: object, stopped: object) -> object:
        started.set()
        while not stopped():  # type: ignore[operator]
            time.sleep(0.01)
        has_stopped.set()
        raise body.ClientGone

    async with listening(make_app(max_body_bytes=MIB)) as server:
        sent = json.dumps({"prompt": "x" * 20_000}).encode()
        monkeypatch.setattr(body, "parse_pieces", endless)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head("/tokenize", b"Content-Length: %d" % len(sent)) + sent)
        await asyncio.to_thread(started.wait, 5)
        writer.transport.abort()
        assert await asyncio.to_thread(has_stopped.wait, 5)
        monkeypatch.undo()
        async with httpx.AsyncClient(base_url=server.address) as client:
            assert (await client.post("/tokenize", json={"prompt": "x" * 20_000})).status_code == 200
