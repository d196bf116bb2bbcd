"""Many at once: fan-out, new schemas, slow heads and bodies, deadlines, and who looks after the server meanwhile.

Promises: each row's figures are printed, kept or broken. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable

import httpx
import psutil

from e2e.served import Served
from e2e.streams import client, stream
from hostile.row import Row
from hostile.watch import Watch

AT_ONCE = 20
SCHEMAS = 5000
SCHEMA_BYTES = 128 << 20  # of caches and beside them
SLOW = 500  # connections
SLOW_SECONDS = 60.0
HEAD_SECONDS, BODY_SECONDS = 15.0, 35.0
LIVE_P99 = 0.25
DEADLINE = 1.0
IDLE_SECONDS = 600.0
_MIB = 1 << 20


async def fan_out(server: Served) -> str:
    """Caps are held before anything is queued, for twenty at once."""
    bodies: list[dict[str, object]] = [
        {"prompt": "a", "n": 10**9},
        {"prompt": "a", "best_of": 10**9},
        {"prompt": ["a"] * 64, "n": 16},
        {"prompt": ["a"] * 20_000},
        {"prompt": "a", "stop": ["x" * 10_240]},
        {"prompt": "a", "logprobs": 10**9},
        {"prompt": "a", "max_tokens": 2**63},
        {"prompt": "a", "bad_words": ["a"] * 20_000},
        {"prompt": "a", "logit_bias": {str(i): 1 for i in range(10_000)}},
    ]
    slowest = 0.0
    async with Watch(server.url, pid=server.process.pid) as watch, client(server.url) as http:
        for body in bodies:

            async def refused(body: dict[str, object] = body) -> float:
                started = time.perf_counter()
                reply = await http.post("/v1/completions", json=body)
                assert reply.status_code in {400, 413}, (reply.status_code, str(body)[:60])
                return time.perf_counter() - started

            slowest = max(slowest, *await asyncio.gather(*(refused() for _ in range(AT_ONCE))))
        assert not await watch.canary()
        seen = await watch.seen()
    assert seen.stall < 0.1, seen
    assert seen.grown < 50 * _MIB, seen
    return f"{len(bodies)} kinds x {AT_ONCE}: slowest refusal {slowest * 1000:.0f} ms; {seen}"


async def schemas(server: Served) -> str:
    """A schema that nobody has sent before in each request, then all of them again."""
    process = psutil.Process(server.process.pid)

    def memory() -> int:
        everybody = (process, *process.children(recursive=True))
        return int(sum(each.memory_info().rss for each in everybody))

    async def ask(http: httpx.AsyncClient, number: int) -> None:
        schema = {"type": "object", "properties": {f"field{number}": {"type": "integer"}}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"prompt": "a", "max_tokens": 1, "response_format": form}
        (await http.post("/v1/completions", json=body)).raise_for_status()

    figures = []
    async with client(server.url) as http:
        for number in range(100):
            await ask(http, -1 - number)
        before = memory()
        for _ in range(2):
            started = time.perf_counter()
            for start in range(0, SCHEMAS, 4):
                await asyncio.gather(*(ask(http, number) for number in range(start, start + 4)))
            figures.append(f"{SCHEMAS} in {time.perf_counter() - started:.0f} s, {(memory() - before) / _MIB:+.0f} MiB")
    assert memory() - before < SCHEMA_BYTES, figures
    return ", then again ".join(figures)


async def slow_senders(server: Served) -> str:
    """Who sends nothing, or a byte now and then, is closed, and nobody else notices."""
    address = httpx.URL(server.url)
    process = psutil.Process(server.process.pid)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    kinds = (b"", b"GET /health HTTP/1.1\r\n", head + b"Content-Length: 1000\r\n\r\n{")
    closed: dict[int, list[float]] = {0: [], 1: [], 2: []}

    async def one(number: int) -> None:
        kind = number % 3
        reader, writer = await asyncio.open_connection(address.host, address.port)
        started = time.perf_counter()
        writer.write(kinds[kind])
        end = asyncio.create_task(reader.read())
        while not end.done() and time.perf_counter() < started + SLOW_SECONDS:
            await asyncio.wait({end}, timeout=1.0)
            with contextlib.suppress(OSError):
                writer.write(b"" if kind == 0 else b"A: b\r\n" if kind == 1 else b" ")
        closed[kind].append(time.perf_counter() - started)
        end.cancel()
        writer.close()

    async with client(server.url) as http:
        usual = await latencies(http, 5.0)
        fds = process.num_fds()
        attack = asyncio.gather(*(one(number) for number in range(SLOW)))
        meanwhile = await latencies(http, BODY_SECONDS)
        await attack
        await asyncio.sleep(2.0)
        left = process.num_fds() - fds
    figures = (
        f"{SLOW} connections: silent ones closed after {max(closed[0]):.0f} s, dripping heads {max(closed[1]):.0f} s,"
        f" bodies {max(closed[2]):.0f} s; others' p99 {usual * 1000:.0f} -> {meanwhile * 1000:.0f} ms; {left} fds left"
    )
    assert max(closed[0]) < HEAD_SECONDS, figures
    assert max(closed[1]) < HEAD_SECONDS, figures
    assert max(closed[2]) < BODY_SECONDS, figures
    assert meanwhile <= max(2 * usual, 0.02), figures
    assert left <= 2, figures
    return figures


async def latencies(http: httpx.AsyncClient, seconds: float) -> float:
    """The p99 of small requests, one after the other."""
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        (await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})).raise_for_status()
        times.append(time.perf_counter() - started)
        await asyncio.sleep(0.02)
    return sorted(times)[int(len(times) * 0.99)]


async def deadlines(server: Served) -> str:
    """A second for what takes many: 504, or an error event in a stream, and nothing goes on."""
    body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "timeout": DEADLINE}
    async with client(server.url) as http:

        async def timed(ask: Awaitable[object]) -> tuple[object, float]:
            started = time.perf_counter()
            return await ask, time.perf_counter() - started

        whole = [timed(http.post("/v1/completions", json=body)) for _ in range(8)]
        streams = [timed(stream(http, body)) for _ in range(8)]
        ended = await asyncio.gather(*whole, *streams)
    for reply, _ in ended[:8]:
        assert isinstance(reply, httpx.Response)
        assert reply.status_code == 504, reply.status_code
    for seen, _ in ended[8:]:
        assert getattr(seen, "done", False), seen
        assert getattr(seen, "errors", None), seen
    slowest = max(took for _, took in ended)
    assert slowest < DEADLINE + 1.0, f"the slowest ended after {slowest:.2f} s"
    await asyncio.to_thread(server.wait_idle)
    return f"16 with {DEADLINE:g} s each ended within {slowest:.2f} s"


async def health(server: Served) -> str:
    """Probes ten times a second while the server is at its limits."""
    times: list[float] = []
    failed: list[str] = []
    paths = ("/health", "/health/live", "/health/ready", "/metrics")

    async with client(server.url) as probe, client(server.url) as http:

        async def ask() -> None:
            turn = 0
            while True:
                path = paths[turn % len(paths)]
                turn += 1
                started = time.perf_counter()
                try:
                    status = (await probe.get(path, timeout=10)).status_code
                    if status != 200:
                        failed.append(f"{path} {status}")
                except httpx.HTTPError as error:
                    failed.append(f"{path} {type(error).__name__}")
                times.append(time.perf_counter() - started)
                await asyncio.sleep(max(0.0, 0.1 - (time.perf_counter() - started)))

        probing = asyncio.create_task(ask())
        text = "word " * 1_000_000
        work: list[Callable[[], Awaitable[object]]] = [
            lambda: http.post("/tokenize", json={"prompt": text}),
            lambda: http.post("/v1/completions", json={"prompt": [7] * 1900, "max_tokens": 1}),
            lambda: asyncio.gather(*(stream(http, {"prompt": f"{i}", "max_tokens": 200}) for i in range(200))),
            lambda: http.post("/v1/completions", json={"prompt": "a", "guided_regex": "((a{1,1000}){1,1000}){1,1000}"}),
        ]
        for _ in range(3):
            for each in work:
                await each()
        probing.cancel()
    p99 = sorted(times)[int(len(times) * 0.99)]
    median = statistics.median(times) * 1000
    figures = f"{len(times)} probes, {len(failed)} failed, median {median:.1f} ms, p99 {p99 * 1000:.0f} ms"
    assert not failed, f"{figures}: {failed[:5]}"
    assert p99 <= LIVE_P99, figures
    return figures


async def after_idleness(server: Served) -> str:
    """Ten minutes without a request, then thirty-two at once."""

    async def burst(http: httpx.AsyncClient) -> float:
        first: list[float] = []
        started = time.perf_counter()

        async def one(i: int) -> None:
            had: list[float] = []

            def on_chunk(_: object) -> None:
                if not had:
                    had.append(time.perf_counter() - started)

            seen = await stream(http, {"prompt": f"{i},", "max_tokens": 40, "ignore_eos": True}, on_chunk=on_chunk)
            assert seen.done
            first.extend(had)

        await asyncio.gather(*(one(i) for i in range(32)))
        assert len(first) == 32
        return statistics.median(first)

    async with client(server.url) as http:
        await burst(http)
        usual = await burst(http)
        await asyncio.sleep(IDLE_SECONDS)
        later = await burst(http)
    figures = f"median first token {usual * 1000:.0f} ms, after {IDLE_SECONDS:g} s of nothing {later * 1000:.0f} ms"
    assert later <= 2 * usual, figures
    return figures


ROWS = (
    Row(name="fan-out", what="twenty at once that ask for too many", act=fan_out),
    Row(name="schemas", what="thousands of schemas that nobody has sent before", act=schemas),
    Row(name="slow-senders", what="five hundred connections that drip or say nothing", act=slow_senders),
    Row(name="deadlines", what="a deadline of a second", act=deadlines),
    Row(name="health", what="probes while the server is at its limits", act=health, flags=("--max-num-seqs", "8")),
    Row(name="idleness", what="a burst after ten minutes of nothing", act=after_idleness),
)
