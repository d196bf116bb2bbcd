"""What arrives on the socket: sizes, framing, slowness. Each is answered in the envelope, or the connection closes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import httpx
import pytest
from fastapi import FastAPI

from support.fakes import connect, exchange, listening, make_app, parse_reply

pytestmark = pytest.mark.anyio

LIMIT = 1 << 18
JSON = b"Content-Type: application/json\r\n"


def limited(**settings: object) -> FastAPI:
    # No idle connection is closed within the patience of these tests, so that none passes because of that.
    bounds = {"max_body_bytes": LIMIT, "header_timeout": 0.4, "body_timeout": 0.5, "timeout_keep_alive": 600}
    return make_app(**{**bounds, **settings})


def post(headers: bytes, body: bytes = b"") -> bytes:
    return b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + JSON + headers + b"\r\n" + body


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def check_envelope(raw: bytes, status: int) -> httpx.Response:
    reply = parse_reply(raw)
    assert reply.status_code == status, raw[:300]
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert "server" not in reply.headers
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert len(raw.partition(b"\r\n\r\n")[2]) == int(reply.headers["content-length"])
    return reply


async def still_serves(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/health")).status_code == 200
        reply = await client.post("/tokenize", json={"prompt": "ab"})
        assert reply.json()["tokens"] == [97, 98]


BIG = json.dumps({"prompt": "x" * LIMIT}).encode()


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        pytest.param([post(b"Content-Length: %d\r\n" % len(BIG), BIG)], 413, id="declared over the limit"),
        pytest.param([post(b"Content-Length: 99999999999999999999\r\n", b"{}")], 400, id="length beyond 64 bits"),
        pytest.param([post(b"Transfer-Encoding: chunked\r\n", chunked(BIG, 65536))], 413, id="chunked over the limit"),
        pytest.param(
            [post(b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n")], 400, id="CL and TE"
        ),
        pytest.param([post(b"Content-Length: 2\r\nContent-Length: 3\r\n", b"{}")], 400, id="two lengths"),
        pytest.param([post(b"Content-Length: 2\r\nContent-Length: 2\r\n", b"{}")], 400, id="two equal lengths"),
        pytest.param([post(b"Content-Length: -1\r\n", b"{}")], 400, id="negative length"),
        pytest.param([post(b"Transfer-Encoding: chunked\r\n", b"zz\r\n{}\r\n0\r\n\r\n")], 400, id="bad chunk size"),
        pytest.param([post(b"Transfer-Encoding: gzip\r\n", b"{}")], 400, id="unknown transfer encoding"),
        pytest.param(
            [post(b"Transfer-Encoding: gzip, chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n")], 400, id="gzip before chunked"
        ),
        pytest.param([post(b"Content-Encoding: gzip, gzip\r\nContent-Length: 2\r\n", b"{}")], 415, id="two codings"),
        pytest.param([b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40_000 + b"\r\n\r\n"], 431, id="large header"),
        pytest.param([b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: a\r\n" * 300 + b"\r\n"], 431, id="many headers"),
        pytest.param([b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 3_000_000], 431, id="endless header"),
        pytest.param([b"GET /" + b"a" * 3_000_000], 431, id="endless path"),
        pytest.param([b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"], 431, id="large path"),
        pytest.param([b"GET /?" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"], 431, id="large query"),
        pytest.param([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], 400, id="TLS to a plain port"),
        pytest.param([b"BREW /pot HTTP/1.1\r\nHost: x\r\n\r\n"], 400, id="unknown method"),
        pytest.param([b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n"], 400, id="unknown version"),
        pytest.param([b"GET /health\r\nno colon\r\n\r\n"], 400, id="not HTTP"),
    ],
)
async def test_refused_and_closed(parts: list[bytes], status: int) -> None:
    async with listening(limited()) as server:
        check_envelope(await exchange(server.port, *parts), status)
        await still_serves(server.port)


@pytest.mark.parametrize(
    "lines",
    [
        b"Authorization: Bearer key \r\n",
        b"Authorization:\tBearer   key\t \r\n",
        b"x-api-key: key \r\n",
    ],
)
async def test_white_space_around_a_value_is_no_part_of_it(lines: bytes) -> None:
    more = b"X-Request-Id: one \r\nContent-Length: 16 \t\r\nConnection: close \r\n"
    async with listening(limited(api_key=("key",))) as server:
        raw = await exchange(server.port, post(lines + more, b'{"prompt": "ab"}'))
        assert raw.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nx-request-id: one\r\n" in raw


@pytest.mark.parametrize(
    "line", [b"A : b", b" A: b", b"A: b\r\n c", b"A: b\x0bc", b"Content-Length\t: 2", b"Transfer-Encoding: \x0cchunked"]
)
async def test_white_space_elsewhere_is_refused(line: bytes) -> None:
    async with listening(limited()) as server:
        check_envelope(await exchange(server.port, post(line + b"\r\n", b"{}")), 400)


async def test_http_1_0_gets_no_chunks() -> None:
    """Where the length is not known before the end of a reply, the end of the connection is its end."""
    body = b'{"prompt": "a", "max_tokens": 3, "stream": true}'
    head = b"Content-Type: application/json\r\nExpect: 100-continue\r\nConnection: keep-alive\r\n"
    async with listening(make_app()) as server:
        raw = await exchange(
            server.port, b"POST /v1/completions HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
        )
        reply = parse_reply(raw)
        assert reply.status_code == 200
        assert "transfer-encoding" not in reply.headers
        assert reply.headers["connection"] == "close"
        assert reply.content.startswith(b"data: {")
        assert reply.content.endswith(b"data: [DONE]\n\n")
        assert all(line.startswith(b"data: ") for line in reply.content.splitlines() if line)
        chunks = b"POST /tokenize HTTP/1.0\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        check_envelope(await exchange(server.port, chunks), 400)  # what its proxies may have taken for another length


async def test_bodies_at_the_limit_pass() -> None:
    body = json.dumps({"prompt": ""}).encode()
    body = json.dumps({"prompt": "x" * (LIMIT - len(body))}).encode()
    assert len(body) == LIMIT
    async with listening(limited(body_timeout=600)) as server:
        for framing in (b"Content-Length: %d\r\n" % LIMIT, b"Transfer-Encoding: chunked\r\n"):
            sent = body if b"Length" in framing else chunked(body, 100_000)
            raw = await exchange(server.port, post(framing + b"Connection: close\r\n", sent))
            assert raw.startswith(b"HTTP/1.1 200 "), raw[:200]


async def test_many_tiny_chunks_are_one_body() -> None:
    body = json.dumps({"prompt": "x" * 20_000}).encode()
    async with listening(limited(body_timeout=600)) as server:
        raw = await exchange(
            server.port, post(b"Transfer-Encoding: chunked\r\nConnection: close\r\n", chunked(body, 1))
        )
        assert b'"count":20000' in raw


async def test_trailers_are_dropped_and_bounded() -> None:
    trailers = b"2\r\n{}\r\n0\r\nAuthorization: Bearer key\r\n\r\n"
    async with listening(limited(api_key=("key",))) as server:
        raw = await exchange(server.port, post(b"Transfer-Encoding: chunked\r\nConnection: close\r\n", trailers))
        check_envelope(raw, 401)
    async with listening(limited(body_timeout=600, max_body_bytes=1024)) as server:
        endless = b"2\r\n{}\r\n0\r\nA: " + b"a" * 3_000_000
        with contextlib.suppress(ConnectionError):
            assert await exchange(server.port, post(b"Transfer-Encoding: chunked\r\n", endless)) == b""
        await still_serves(server.port)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"1" * 5000 + b"}",
        '{"prompt": "a"}'.encode("utf-16"),
        b"\x00" * 100,
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"",
    ],
)
async def test_bad_json_is_400(raw: bytes) -> None:
    async with connect(limited()) as client:
        reply = await client.post("/tokenize", content=raw, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"] in {"invalid_json", "duplicate_key"}) == (400, True)


async def test_nul_characters_are_text() -> None:
    async with connect(limited()) as client:
        assert (await client.post("/tokenize", json={"prompt": "a\x00b"})).json()["tokens"] == [97, 0, 98]


async def test_a_silent_connection_is_closed() -> None:
    async with listening(limited()) as server:
        started = time.perf_counter()
        assert await exchange(server.port) == b""
        assert time.perf_counter() - started > 0.3


async def test_a_head_that_trickles_is_408() -> None:
    async with listening(limited()) as server:
        check_envelope(await exchange(server.port, b"GET /health HTTP/1.1\r\n", b"A: b\r\n", pause=0.15), 408)


async def test_a_body_that_trickles_is_408() -> None:
    async with listening(limited()) as server:
        reply = check_envelope(await exchange(server.port, post(b"Content-Length: 100\r\n"), b"{", pause=0.1), 408)
        assert reply.headers["connection"] == "close"


async def test_the_rest_of_a_refused_body_does_not_hold_the_connection() -> None:
    async with listening(limited(api_key=("key",), timeout_keep_alive=120)) as server:
        parts = [post(b"Content-Length: 1000\r\n"), *[b"x"] * 4]
        raw = await exchange(server.port, *parts, pause=0.1)
        assert raw.startswith(b"HTTP/1.1 401 ")


async def test_an_idle_connection_is_kept_and_then_closed() -> None:
    async with listening(limited(timeout_keep_alive=0.8)) as server:
        request = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
        started = time.perf_counter()
        raw = await exchange(server.port, request, request, pause=0.5)
        assert raw.count(b"HTTP/1.1 200 OK") == 2
        assert time.perf_counter() - started > 1.0


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with listening(limited()) as server:
        first = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: one\r\n\r\n"
        second = b"GET /nothing HTTP/1.1\r\nHost: x\r\nX-Request-Id: two\r\nConnection: close\r\n\r\n"
        raw = await exchange(server.port, first + second)
        assert raw.index(b"x-request-id: one") < raw.index(b"x-request-id: two")
        assert b"404 Not Found" in raw


async def test_connections_over_the_cap_are_503() -> None:
    async with listening(limited(max_connections=3, header_timeout=600)) as server:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        await asyncio.sleep(0.05)
        reply = check_envelope(await exchange(server.port), 503)
        assert 1 <= int(reply.headers["retry-after"]) <= 30
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        await still_serves(server.port)


async def test_those_who_were_turned_away_keep_nobody_out() -> None:
    """They may stay a second to read why, and come back faster than that."""
    async with listening(limited(max_connections=3, header_timeout=600)) as server:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        away = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for reader, _ in away:
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await reader.read() == b""  # not even a reply: as many as may be open read theirs
        held[0][1].close()
        await held[0][1].wait_closed()
        await still_serves(server.port)
        for _, each in (*held[1:], *away, (reader, writer)):
            each.close()


GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"model": "m", "prompt": "a", "max_tokens": 64, "stream": true}'
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
) + BODY


@pytest.mark.parametrize("requests", [GET * 2, GET * 3, POST * 2, POST + GET, GET + POST, POST * 5])
async def test_garbage_behind_pipelined_requests_is_one_refusal(
    requests: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The requests before it would send their replies behind the error, on a connection that is closed for writing."""
    async with listening(make_app()) as server:
        raw = await exchange(server.port, requests + b"\x00\xffgarbage\r\n\r\n")
        assert raw.count(b"HTTP/1.1 ") == 1
        assert parse_reply(raw).json()["error"]["code"] == "invalid_http"
        assert parse_reply(
            await exchange(server.port, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        ).is_success
    assert not [record for record in caplog.records if record.levelname == "ERROR" or record.exc_info]
