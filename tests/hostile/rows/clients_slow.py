"""Clients that do not read the streams they asked for, or hardly: what they cost, and when they are cut off."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from e2e.served import Served
from hostile.http_bytes import Pool, connect, post
from hostile.row import Row

WRITE_TIMEOUT = 10.0  # of the rows' servers; a minute by default
MOST_TOKENS = 1900


def story(server: Served, number: int) -> bytes:
    """A stream of as many tokens as the model has, and of as many bytes for each as there may be."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
        "max_tokens": MOST_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "seed": number,
        "logprobs": True,
        "top_logprobs": 20,
    }
    return post(server.url, "/v1/chat/completions", body)


def is_cut(sock: socket.socket) -> bool:
    """Whether the server has ended the connection, as far as can be known without reading."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))


async def sip(sock: socket.socket) -> None:
    """20 bytes a second, until the connection ends."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while True:
            if not await loop.sock_recv(sock, 20):
                return
            await asyncio.sleep(1.0)


async def reader_seconds(server: Served) -> float:
    """How long a well-behaved stream of 100 tokens takes."""
    pool = Pool(server.url)
    exchange = await pool.take()
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
    started = time.perf_counter()
    await exchange.send(post(server.url, "/v1/completions", body))
    assert exchange.is_whole, "a stream beside them was not whole"
    exchange.close()
    return time.perf_counter() - started


def rss(server: Served) -> float:
    """Of the API process, MB."""
    return psutil.Process(server.process.pid).memory_info().rss / 1e6


async def watch(server: Served, sockets: Sequence[socket.socket], alone: float, before: float) -> str:
    """Until all are cut; what they were like meanwhile."""
    started = time.monotonic()
    count = len(sockets)
    most_held = most_bytes = most_rss = beside = 0.0
    is_still_at, tokens = 0.0, -1.0
    is_gone: set[int] = set()
    num_cut = 0
    while (seconds := time.monotonic() - started) < 6 * WRITE_TIMEOUT:
        most_held = max(most_held, server.metric("quire_requests_held"))
        most_bytes = max(most_bytes, server.metric("quire_reply_bytes_waiting"))
        most_rss = max(most_rss, rss(server))
        news = server.metric("quire_generation_tokens_total")
        if news != tokens:
            tokens, is_still_at = news, seconds
        is_gone |= {number for number, sock in enumerate(sockets) if number not in is_gone and is_cut(sock)}
        num_cut = len(is_gone)
        if num_cut == count:
            break
        if seconds > WRITE_TIMEOUT / 2 and not beside:
            beside = await reader_seconds(server)
            tokens = server.metric("quire_generation_tokens_total")
        await asyncio.sleep(0.1)
    told = (
        f"{num_cut} of {count} were cut, the last after {seconds:.1f} s (client_write_timeout {WRITE_TIMEOUT:g});"
        f" {tokens:.0f} tokens were made of {count * MOST_TOKENS}, the last after {is_still_at:.1f} s; at most"
        f" {most_held:.0f} were held, {most_bytes / 1e3:.0f} kB of replies waited, memory grew by"
        f" {most_rss - before:.1f} MB; a stream of 100 tokens took {beside:.2f} s beside them, {alone:.2f} s alone"
    )
    assert num_cut == count, told
    server.wait_idle()
    return told


async def take_nothing(server: Served) -> str:
    alone, before = await reader_seconds(server), rss(server)
    sockets = [await connect(server.url) for _ in range(16)]
    for number, sock in enumerate(sockets):
        await asyncio.get_running_loop().sock_sendall(sock, story(server, number))
    try:
        return await watch(server, sockets, alone, before)
    finally:
        for sock in sockets:
            sock.close()


async def take_little(server: Served) -> str:
    alone, before = await reader_seconds(server), rss(server)
    sockets = [await connect(server.url) for _ in range(32)]
    for number, sock in enumerate(sockets):
        await asyncio.get_running_loop().sock_sendall(sock, story(server, number))
    sipping = [asyncio.create_task(sip(sock)) for sock in sockets]
    try:
        return await watch(server, sockets, alone, before)
    finally:
        for task in sipping:
            task.cancel()
        await asyncio.gather(*sipping, return_exceptions=True)
        for sock in sockets:
            sock.close()


FLAGS, LIMITS = ("--max-num-seqs", "16"), f"client_write_timeout={WRITE_TIMEOUT:g}"
ROWS = (
    Row(
        name="clients-silent",
        what="16 readers that take nothing of their streams",
        act=take_nothing,
        flags=FLAGS,
        limits=LIMITS,
    ),
    Row(
        name="clients-sipping",
        what="32 readers that take 20 bytes a second",
        act=take_little,
        flags=FLAGS,
        limits=LIMITS,
    ),
)
