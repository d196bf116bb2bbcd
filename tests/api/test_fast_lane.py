"""The fast lane of streams: the same bytes as the stream's task writes, over a corpus of requests and of clients."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from quire_engine.contract.types import GenerationRequest
from quire_server.answering.generation import Lane
from quire_server.http import sse
from support.covering import few
from support.fake_engine import FakeEngine
from support.fakes import listening, make_app, make_state

pytestmark = pytest.mark.anyio

# Characters of one to four bytes, each byte a token, and line ends of Unicode, which are escaped in streams.
TEXT = 'A "quick" naïve\u2028 fox — 日本 \U0001f98a\u0085 jumps\n\\ over. '.encode()
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
COMPLETION: dict[str, Any] = {"prompt": "a"}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "chat": ("/v1/chat/completions", CHAT),
    "messages": ("/v1/messages", CHAT),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 90, "max_tokens": None, "ignore_eos": None}),
    "usage-at-end": ("/v1/completions", COMPLETION | {"stream_options": {"include_usage": True}}),
    "usage-always": (
        "/v1/chat/completions",
        CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "token-ids": ("/v1/completions", COMPLETION | {"return_token_ids": True}),
    "two-choices": ("/v1/completions", COMPLETION | {"n": 2, "temperature": 1}),
    "two-prompts": ("/v1/completions", {"prompt": ["a", "b"]}),
    "logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "stop-string": ("/v1/completions", COMPLETION | {"stop": "jumps"}),
    "echo": ("/v1/completions", COMPLETION | {"echo": True}),
    "one-token": ("/v1/completions", COMPLETION | {"max_tokens": 1}),
    "whole-characters-only": ("/v1/completions", COMPLETION | {"max_tokens": 13}),
}


def fox(_request: GenerationRequest, _choice: int) -> Sequence[int]:
    return tuple(TEXT)


async def send(port: int | None, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    fields = {"max_tokens": 90, "ignore_eos": True, "stream": True, **body}
    data = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: one\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


async def reply(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], pause: float = 0.0) -> bytes:
    """The body of a chunked reply, without what time and chance have made."""
    reader, _ = streams
    async with asyncio.timeout(300):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head, head + await reader.read(2000)
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
            await asyncio.sleep(pause)
    body = re.sub(rb'"(created|created_at|completed_at)":[\d.]+', rb'"\1":0', body)
    return re.sub(rb'"(id|item_id|response_id)":"[^"]*"', rb'"\1":""', body)


class Counting:
    """How many outputs the lane has taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        call = Lane.__call__

        def counted(lane: Lane, output: Any) -> bool:
            is_taken = call(lane, output)
            self.taken += is_taken
            return is_taken

        monkeypatch.setattr(Lane, "__call__", counted)


@pytest.mark.parametrize("name", BODIES)
async def test_both_lanes_write_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Counting(monkeypatch)
    path, body = BODIES[name]
    engine = FakeEngine(replies=fox, num_cached_tokens=1, step_seconds=0.0005)
    async with listening(make_app(make_state(engine=engine))) as server:
        fast = await reply(await send(server.port, path, body))
        assert lane.taken > 40 or name in {
            "two-choices",
            "two-prompts",
            "stop-string",
            "one-token",
            "whole-characters-only",
        }
        before = lane.taken
        monkeypatch.setattr(sse, "straight_writer", lambda _: None)
        slow = await reply(await send(server.port, path, body))
        assert lane.taken == before
    assert fast == slow
    assert fast.endswith(b"\n\n")


@pytest.mark.parametrize("name", few(["completion", "chat", "usage-always"], "completion"))
async def test_a_client_that_reads_slowly_gets_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = BODIES[name][0], {**BODIES[name][1], "max_tokens": 400}
    state = make_state(engine=FakeEngine(replies=lambda *_: (120,) * 20 + tuple(TEXT)), stream_buffer_tokens=8)
    monkeypatch.setattr(sse, "_UNSENT_BYTES", 2048)
    texts = []
    async with listening(make_app(state)) as server:
        for pause in (0.0, 0.002):
            reader, writer = await send(server.port, path, body)
            peer: socket.socket = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            got = await reply((reader, writer), pause)
            # A frame may have the text of several tokens then, so the texts are held against each other.
            frames = [json.loads(line[6:]) for line in got.split(b"\n") if line.startswith(b"data: {")]
            choices = [frame["choices"][0] for frame in frames if frame["choices"]]
            texts.append("".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices))
            assert got.endswith(b"data: [DONE]\n\n")
    assert texts[0] == texts[1]


async def test_a_client_that_leaves_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Counting(monkeypatch)
    engine = FakeEngine(replies=fox, step_seconds=0.01)
    async with listening(make_app(make_state(engine=engine))) as server:
        reader, writer = await send(server.port, "/v1/completions", COMPLETION | {"max_tokens": 450})
        await reader.readuntil(b'"text":"q"')
        writer.close()
        async with asyncio.timeout(300):
            while not engine.aborted:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.005)
        assert lane.taken > 0
        assert not engine.live


async def test_a_silent_stream_gets_keep_alives_and_tokens_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Counting(monkeypatch)
    engine = FakeEngine(replies=fox, step_seconds=0.005)
    state = make_state(engine=engine, sse_keep_alive_interval=0.05)
    async with listening(make_app(state)) as server:
        reader, _ = await send(server.port, "/v1/completions", COMPLETION | {"max_tokens": 200})
        await reader.readuntil(b'"text":"q"')
        engine.hold()
        await reader.readuntil(b": keep-alive\n\n")
        before = lane.taken
        engine.release()
        rest = await reader.readuntil(b"[DONE]")
        assert lane.taken > before
        assert rest.count(b'"text":"q"') > 1


async def test_a_stop_ends_streams_of_the_lane_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Counting(monkeypatch)
    state = make_state(engine=FakeEngine(replies=fox, step_seconds=0.01))
    async with listening(make_app(state)) as server:
        reader, _ = await send(server.port, "/v1/completions", COMPLETION | {"max_tokens": 450})
        await reader.readuntil(b'"text":"q"')
        assert lane.taken > 0
        state.client.close()
        assert b'"code":"shutting_down"' in await reader.readuntil(b"[DONE]\n\n")


async def test_an_error_of_the_lane_ends_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(replies=fox, step_seconds=0.001)
    call = Lane.__call__
    failed: list[Any] = []

    def fails_once(lane: Lane, output: Any) -> bool:
        is_taken = call(lane, output)
        if is_taken and not failed:
            failed.append(output)
            raise ValueError("planted")
        return is_taken

    monkeypatch.setattr(Lane, "__call__", fails_once)
    async with listening(make_app(make_state(engine=engine))) as server:
        clients = [await send(server.port, "/v1/completions", COMPLETION) for _ in range(3)]
        bodies = [await reply(each) for each in clients]
    assert sorted(b"internal_error" in body for body in bodies) == [False, False, True]
    assert not engine.live
