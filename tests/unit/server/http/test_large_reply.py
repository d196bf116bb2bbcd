"""Replies in pieces against a bare ASGI server: small and large ones, clients that leave or do not read, the bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from quire_server.errors import NotReady
from quire_server.http.large_reply import WHOLE_BYTES, HeldReply, PiecedReply, ReplyBudget
from support.asgi_exchange import Exchange

pytestmark = pytest.mark.anyio

PIECE = b"x" * 10_000


class Server(Exchange):
    """That sends a reply in pieces."""

    async def reply(self, pieces: Iterator[bytes], held: HeldReply | None = None, version: str = "1.1") -> None:
        reply = PiecedReply(pieces, held=held, headers={"x-note": "1"})
        await reply({"type": "http", "http_version": version}, self.receive, self.send)


async def test_a_small_reply_is_whole() -> None:
    server = Server()
    await server.reply(iter([b"[1", b",2]"]))
    assert server.body == b"[1,2]"
    assert server.headers[b"content-length"] == b"5"
    assert server.headers[b"content-type"] == b"application/json"
    assert server.headers[b"x-note"] == b"1"
    assert len(server.sent) == 2


async def test_a_large_reply_comes_as_it_is_made() -> None:
    server, made = Server(), []

    def pieces() -> Iterator[bytes]:
        for number in range(200):
            made.append(len(server.body))
            yield b"%04d" % number + PIECE

    await server.reply(pieces())
    assert server.body == b"".join(b"%04d" % number + PIECE for number in range(200))
    assert b"content-length" not in server.headers
    assert all(len(message.get("body", b"")) <= 1 << 16 for message in server.sent)
    assert not server.sent[-1]["more_body"]
    behind = [number * 10_004 - sent for number, sent in enumerate(made)]
    assert max(behind) <= WHOLE_BYTES + len(PIECE) + 4, "no more was made than has found room"


async def test_for_the_old_protocol_it_is_whole() -> None:
    server = Server()
    await server.reply(iter([PIECE] * 100), version="1.0")
    assert server.headers[b"content-length"] == b"1000000"
    assert server.body == PIECE * 100


async def test_nothing_is_made_for_who_does_not_read_or_has_left() -> None:
    server, made, budget = Server(), [], ReplyBudget(1 << 30)
    held = budget.hold()
    held.grow(5 << 20)

    def pieces() -> Iterator[bytes]:
        for _ in range(500):
            made.append(1)
            yield PIECE

    replying = asyncio.create_task(server.reply(pieces(), held))
    server.takes.clear()
    await asyncio.sleep(0.05)
    before = len(made)
    assert before < 40
    assert budget.num_bytes == 5 << 20
    server.leaves.set()
    server.takes.set()
    await asyncio.wait_for(replying, 300)
    assert len(made) <= before + 40
    assert budget.num_bytes == 0


async def test_others_get_their_turn() -> None:
    server, turns = Server(), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await server.reply(iter([PIECE] * 500))
    running.cancel()
    assert turns > 20


async def test_others_get_their_turn_while_a_small_reply_is_made() -> None:
    server, turns = Server(), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            until = time.perf_counter() + 0.003
            while time.perf_counter() < until:
                pass
            yield b"x"

    running = asyncio.create_task(others())
    await server.reply(pieces())
    running.cancel()
    assert turns >= 6


async def test_what_is_held_is_bounded() -> None:
    told: list[int] = []
    refused: list[bool] = []
    budget = ReplyBudget(10 << 20, on_change=told.append, on_refused=lambda: refused.append(True))
    first, second = budget.hold(), budget.hold()
    first.grow(WHOLE_BYTES)
    assert budget.num_bytes == 0, "small replies are not counted"
    first.grow(20 << 20)
    with pytest.raises(NotReady) as caught:
        second.grow(1 << 20)
    assert caught.value.code == "replies_full"
    assert refused == [True]
    first.release()
    first.release()
    assert budget.num_bytes == 0
    third = budget.hold()
    third.grow(6 << 20)
    del third
    assert budget.num_bytes == 0, "given back when it is forgotten"
    assert told[-1] == 0
