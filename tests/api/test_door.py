"""Refusals by the connection: bytes, lines and counts of the layers' own, and none where they would not refuse."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.types import Scope

from quire_server.http.door import Door, Refused
from quire_server.logs import JsonFormatter
from quire_server.metrics.request_record import CURRENT
from support.certificates import make_certificates
from support.fake_engine import FakeEngine
from support.fakes import listening, make_app, make_state

pytestmark = pytest.mark.anyio

KEY = "k-0123456789"
BODY = b'{"prompt": "a", "max_tokens": 3}'
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/infill", "/v1/embeddings", "/rerank")


def post(path: str, *lines: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    head = (f"POST {path} HTTP/{version}", "Host: localhost", *lines, f"Content-Length: {len(body)}")
    return "\r\n".join((*head, "Content-Type: application/json", "", "")).encode() + body


@dataclass
class Full:
    """A server whose only place is taken, and one connection to it."""

    state: object
    engine: FakeEngine
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    decisions: list[Refused | None]  # the door's
    closes_door: Callable[[bool], None]
    bytes_waiting: Callable[[], int]
    connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

    async def reply(self) -> bytes:
        async with asyncio.timeout(300):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            return head + await self.reader.readexactly(int(length[1]))

    async def ask(self, message: bytes) -> bytes:
        self.writer.write(message)
        return await self.reply()


@asynccontextmanager
async def full(monkeypatch: pytest.MonkeyPatch, opening: dict[str, object] | None = None, **options: object):
    """`opening`: how the connection is opened, beside its address."""
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=1, **options)
    app = make_app(state)
    decisions: list[Refused | None] = []
    refuse = Door.refuse

    def noted(door: Door, scope: Scope) -> Refused | None:
        decisions.append(refuse(door, scope))
        return decisions[-1]

    monkeypatch.setattr(Door, "refuse", noted)
    the_door = app.state.door
    uds = state.settings.uds

    async def connection(port: int | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if uds is not None:
            return await asyncio.open_unix_connection(uds)
        return await asyncio.open_connection("127.0.0.1", port, **(opening or {}))

    async with listening(app) as server:
        engine.hold()
        other, first = await connection(server.port)
        key = [f"Authorization: Bearer {KEY}"] if state.settings.needs_key else []
        first.write(post("/v1/completions", *key))
        async with asyncio.timeout(300):
            while not engine.live:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        decisions.clear()
        reader, writer = await connection(server.port)
        yield Full(
            state,
            engine,
            reader,
            writer,
            decisions,
            lambda shut: setattr(app.state, "door", None if shut else the_door),
            server.bytes_waiting,
            lambda: connection(server.port),
        )
        engine.release()
        async with asyncio.timeout(300):
            assert b" 200 " in await other.readuntil(b"\r\n\r\n")
        first.close()
        writer.close()


def without_times(reply: bytes) -> bytes:
    assert re.search(rb"\r\nretry-after: [1-9]\d*\r\nretry-after-ms: [1-9]\d{3,}\r\n", reply), reply
    return re.sub(rb"(retry-after|retry-after-ms|date): [^\r]*", rb"\1:", reply)


@pytest.mark.parametrize(
    "options",
    [{}, {"api_key": (f"alice={KEY}",)}, {"allowed_origins": ("http://here",), "root_path": "/llm"}],
    ids=["open", "keys", "origins"],
)
async def test_its_bytes_lines_and_counts_are_those_of_the_layers(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="quire.access")
    keys = [f"Authorization: Bearer {KEY}"] if "api_key" in options else []
    root = str(options.get("root_path", ""))
    async with full(monkeypatch, **options) as server:
        seen = []
        for shut in (False, True):
            server.closes_door(shut)
            caplog.clear()
            before = server.state.metrics.render().decode()
            replies = [
                without_times(await server.ask(post(root + path + query, "X-Request-Id: mine", *keys, body=body)))
                for path in OPENAI
                for query, body in (("", BODY), ("?a=%20", b"{not json"), ("", b"x" * 60_000))
            ]
            lines = [json.loads(JsonFormatter().format(each)) for each in caplog.records]
            for line in lines:
                for varying in ("time", "ts", "timestamp", "seconds", "message"):
                    line.pop(varying, None)
            seen.append((replies, lines, counted(server.state.metrics.render().decode(), before)))
            assert all(reply.startswith(b"HTTP/1.1 429 ") for reply in replies)
        by_connection, by_layers = seen
        assert by_connection == by_layers
        assert len(by_connection[1]) == len(by_connection[0]) == 3 * len(OPENAI)
        assert by_connection[2]["quire_rejected_total", "max_num_queued_reqs"] == 3 * len(OPENAI)
        assert by_connection[2]["quire_http_requests_total", "/v1/completions"] == 3
        assert len(server.decisions) == 3 * len(OPENAI)
        assert all(server.decisions)
        assert CURRENT.get() is None


def counted(after: str, before: str) -> dict[tuple[str, str], float]:
    """By how much the counters of refusals and replies have grown, by their reason or handler."""
    sample = re.compile(
        r'^(quire_rejected_total|quire_http_requests_total)\{.*(?:reason|handler)="([^"]*)".*\} (\S+)$', re.M
    )
    old = {found[:2]: float(found[2]) for found in sample.findall(before)}
    return {found[:2]: float(found[2]) - old.get(found[:2], 0.0) for found in sample.findall(after)}


async def test_what_the_layers_answer_in_their_own_way_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"Authorization: Bearer {KEY}"
    left = [
        (429, post("/v1/messages", key, body=b'{"messages": []}')),  # another envelope
        (429, post("/api/chat", key)),
        (429, post("/v1/completions", key, "Origin: http://x")),
        (429, post("/v1/completions", key, "X-Quire-Explain: route")),
        (401, post("/v1/completions")),
        (401, post("/v1/completions", "Authorization: Bearer wrong", "x-api-key: wrong")),
        (401, post("/v1/completions", "Authorization: Bearer admin-0123456789")),
        (403, post("/v1/completions", key, "Host: elsewhere")),
        (415, post("/v1/completions", key, "Content-Encoding: br")),
        (429, post("/v1/completions", key, "Content-Encoding: gzip")),
        (413, post("/v1/completions", key, body=b"x" * 30_000)),
        (431, post("/v1/completions", key, *(f"A{number}: 1" for number in range(200)))),
        (404, post("/v1/completion", key)),
        (200, post("/tokenize", key)),
        (200, f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{key}\r\n\r\n".encode()),
        (200, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (200, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (401, b"POST /admin/drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"),
        (429, post("/v1/completions", key, "Connection: close")),
    ]
    options = {"api_key": (KEY,), "admin_api_key": ("admin-0123456789",), "allowed_hosts": ("localhost",)}
    async with full(monkeypatch, max_body_bytes=20_000, **options) as server:
        for status, message in left:
            server.writer.close()
            server.reader, server.writer = await server.connect()
            reply = await server.ask(message)
            assert reply.startswith(b"HTTP/1.1 %d " % status), (message, reply)
        assert await server.reader.read() == b""
        assert server.decisions == [None] * (len(left) - 1)  # nobody asks it for the last of a connection


async def test_its_request_has_the_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    carriers = []
    log = "quire_server.app.log_reply"
    monkeypatch.setattr(log, lambda *_: carriers.append(CURRENT.get().carrier))  # type: ignore[union-attr]
    async with full(monkeypatch) as server:
        for parent in ("00-1-2-01", "00-3-4-01"):
            await server.ask(post("/v1/completions", f"traceparent: {parent}"))
    assert carriers[:2] == [{"traceparent": "00-1-2-01"}, {"traceparent": "00-3-4-01"}]


async def test_requests_on_one_connection_are_answered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in pieces and pipelined, refused ones between others."""
    ids = [f"request-{number}" for number in range(60)]

    def message(request_id: str) -> bytes:
        number = int(request_id.rpartition("-")[2])
        if number % 5 == 4:
            return f"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {request_id}\r\n\r\n".encode()
        return post("/v1/completions", f"X-Request-Id: {request_id}")

    async with full(monkeypatch) as server:
        for size in (10**6, 7, 300):
            whole = b"".join(map(message, ids))
            for start in range(0, len(whole), size):
                server.writer.write(whole[start : start + size])
                if size < 10**6:
                    await asyncio.sleep(0)
            for request_id in ids:
                reply = await server.reply()
                assert f"x-request-id: {request_id}\r\n".encode() in reply
                assert reply.startswith(b"HTTP/1.1 200 " if b"GET" in message(request_id) else b"HTTP/1.1 429 ")
        assert any(server.decisions)
        server.decisions.clear()
        server.writer.write(message("request-4") + message("request-5") * 2)
        assert [(await server.reply())[9:12] for _ in range(3)] == [b"200", b"429", b"429"]
        assert server.decisions == [None]  # about the first: hundreds in a row would be answered within one another
        server.writer.write(post("/v1/completions")[:-5])  # refused by its head; the rest of its body comes later
        assert b" 429 " in await server.reply()
        server.writer.write(BODY[-5:])
        server.engine.release()
        async with asyncio.timeout(300):
            while server.engine.live:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert b" 200 " in await server.ask(post("/v1/completions"))


@pytest.mark.matrix  # as in test_slow_readers.py
async def test_a_client_that_does_not_read_is_not_written_to_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full(monkeypatch) as server:
        sent, answered = 20_000, -1
        server.reader._transport.pause_reading()  # type: ignore[attr-defined]
        server.writer.write(post("/v1/completions") * sent)
        async with asyncio.timeout(300):
            while answered < len(server.decisions):
                answered = len(server.decisions)
                await asyncio.sleep(0.5)
        assert 0 < answered < sent
        assert server.bytes_waiting() < 64 << 10
        server.reader._transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(sent):
            assert b" 429 " in await server.reply()


@pytest.mark.parametrize("kind", ["tls", "uds"])
async def test_over_tls_and_on_a_path(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening: dict[str, object] = {}
    if kind == "tls":
        files = make_certificates(tmp_path)
        opening = {"ssl": ssl.create_default_context(cafile=str(files.authority)), "server_hostname": "localhost"}
        options: dict[str, object] = {"ssl_certfile": files.server, "ssl_keyfile": files.server_key}
    else:
        options = {"uds": tmp_path / "quire.sock"}
    async with full(monkeypatch, opening, **options) as server:
        by_connection = without_times(await server.ask(post("/v1/completions", "X-Request-Id: mine")))
        server.closes_door(True)
        assert by_connection == without_times(await server.ask(post("/v1/completions", "X-Request-Id: mine")))
        assert len(server.decisions) == 1
        assert server.decisions[0] is not None


async def test_a_draining_server_says_so_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full(monkeypatch) as server:
        server.state.phase.draining = True
        assert b" 503 " in await server.ask(post("/v1/completions"))
        assert server.decisions == [None]
        server.state.phase.draining = False
