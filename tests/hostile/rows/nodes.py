"""Peers of a node that say nothing, or odd things as a front would: its fronts are served as before.

Promises: the node and its front are started by the row. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

import httpx
import psutil

from e2e.served import Served
from e2e.served_node import ServedNode
from hostile.row import Row
from quire_engine.contract.types import GenerationRequest
from quire_engine.links.link_security import LinkSecurity
from quire_engine.process.transport import Kind
from quire_server.engine.nodes.addresses import parse_address
from quire_server.engine.nodes.connecting import connect
from quire_server.engine.nodes.link import MOST_UNFINISHED, Link
from support.processes import children_running
from support.supervising import request

NODE = ("--max-model-len", "512", "--kv-memory", "16MiB")
STRANGERS, AGAIN_SECONDS, MOST_SECONDS = 160, 0.5, 60.0
FRAMES, FRAME_BYTES, BESIDE_FRAMES = 8, 60 << 20, 64 << 20
SAMPLED = request("r").sampling
ODD: dict[str, GenerationRequest] = {
    "a token of 2^40": request("r", (1, 1 << 40)),
    "a token below 0": request("r", (-1,)),
    "a long prompt": request("r", (1,) * 100_000),
    "many tokens": request("r", tokens=1 << 62),
    "a million choices": request("r", n=1_000_000),
    "no choice": request("r", n=0),
    "no weight": replace(request("r"), weight=0.0),
    "a weight that is no number": replace(request("r"), weight=float("nan")),
    "a banned token": replace(request("r"), sampling=replace(SAMPLED, banned_sequences=((1, 1 << 40),))),
    "a large seed": replace(request("r"), sampling=replace(SAMPLED, seed=(1 << 64) - 1)),
    "a finished choice": replace(request("r"), finished_choices=(7,)),
    "an answer of others": replace(request("r"), resumed_token_ids=((1 << 40,),)),
}


def _answer(server: Served) -> str:
    body = {"prompt": "a", "max_tokens": 8, "temperature": 0}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120)
    reply.raise_for_status()
    return str(reply.json()["choices"][0]["text"])


async def strangers(_: Served) -> str:
    """As many silent connections as the node has places for, and more: a front connects all the same."""

    async def stay(node: ServedNode) -> None:
        address = parse_address(node.address, "")
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                while await reader.read(1 << 10):
                    pass
                writer.close()
            await asyncio.sleep(AGAIN_SECONDS)

    def front(node: ServedNode) -> float:
        started = time.monotonic()
        with Served("--engines", node.address, start_seconds=MOST_SECONDS) as server:
            took = time.monotonic() - started
            _answer(server)
        return took

    with ServedNode(*NODE) as node:
        alone = await asyncio.to_thread(front, node)
        silent = [asyncio.create_task(stay(node)) for _ in range(STRANGERS)]
        try:
            await asyncio.sleep(1.0)
            beside = await asyncio.to_thread(front, node)
        except TimeoutError:
            raise AssertionError(f"a front is not connected after {MOST_SECONDS:g} s") from None
        finally:
            for task in silent:
                task.cancel()
            await asyncio.gather(*silent, return_exceptions=True)
    return f"a front serves {beside:.1f} s after its start, without them {alone:.1f} s"


async def _front(node: ServedNode) -> Link:
    link = await connect(parse_address(node.address, ""), LinkSecurity())
    link.begin(lambda _: None)
    return link


def _num_bytes(node: ServedNode) -> int:
    return int(psutil.Process(node.process.pid).memory_info().rss)


async def _unfinished(node: ServedNode) -> int:
    """The bytes that a node's process grows by while frames do not end, at most."""
    before, most, piece = _num_bytes(node), 0, bytes(1 << 20)
    links = [await _front(node) for _ in range(FRAMES)]
    for link in links:
        link.write((FRAME_BYTES + 1).to_bytes(4, "little") + bytes([Kind.SUBMIT]))
    for _ in range(FRAME_BYTES // len(piece) - 1):
        for link in links:
            link.write(piece)
        await asyncio.sleep(0.005)
        most = max(most, _num_bytes(node) - before)
    for _ in range(20):
        await asyncio.sleep(0.05)
        most = max(most, _num_bytes(node) - before)
    for link in links:
        link.abort("it was only tried")
    return most


async def odd_frames(_: Served) -> str:
    """Requests that no server would make, and frames without an end, beside another front's requests."""
    with ServedNode(*NODE) as node, Served("--engines", node.address) as server:
        before, engines = _answer(server), _engines(node)
        assert len(engines) >= 1
        for name, odd in ODD.items():
            link = await _front(node)
            link.send(odd)
            await asyncio.sleep(0.1)
            link.abort("it was only tried")
            after = await asyncio.to_thread(_answer, server)
            assert after == before, f"another answer after {name}"
        assert engines <= _engines(node), "the node's engine was replaced"
        held = await _unfinished(node)
        assert held <= MOST_UNFINISHED + BESIDE_FRAMES, f"{held >> 20} MiB are held of frames that do not end"
        assert await asyncio.to_thread(_answer, server) == before
    assert held > FRAME_BYTES, f"the frames were not taken at all, {held >> 20} MiB"
    return (
        f"{len(ODD)} odd requests, no engine replaced; of {FRAMES * FRAME_BYTES >> 20} MiB in frames without an end"
        f" {held >> 20} are held at most"
    )


def _engines(node: ServedNode) -> set[int]:
    return {each.pid for each in children_running(node.process.pid, "quire_engine.process")}


ROWS = (
    Row(name="silent-strangers", what=f"{STRANGERS} silent strangers on a node's port", act=strangers),
    Row(name="odd-frames", what="odd frames of a front", act=odd_frames),
)
