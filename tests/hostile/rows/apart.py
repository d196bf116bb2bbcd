"""One client, file or signal against all others: workers that stop or are killed, planted modules, floods of one key.

Promises: processes are stopped by their ids, and continued where they are left. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from e2e.served import Served
from e2e.streams import client
from hostile.row import Row
from support.planted_modules import LONG, plant, ran, start_all_children
from support.processes import children_running
from support.start_signals import signal_at

ONE, OTHER = "one-key-of-sixteen", "other-key-of-sixteen"
KEYS = ("--api-key", f"one={ONE}", "--api-key", f"other={OTHER}")
FLOOD = 1030  # responses, more than are kept
AT_ONCE = 8
MOST_LOGGED = 400  # bytes for a connection
SPARE_SECONDS = 60.0
MOMENTS = ("its first line", "settings", "event loop", "engine launched", "port", "torch")
PIPELINED = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2 + b"\x00\xffgarbage\r\n\r\n"
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4}


async def _answered(http: httpx.AsyncClient, path: str, body: dict[str, object]) -> float:
    """Seconds until the answer, which is to be 200."""
    started = time.monotonic()
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text[:300]
    return time.monotonic() - started


def _worker_row(path: str, body: dict[str, object], part: str, harm: Callable[[psutil.Process], None]) -> Row:
    async def act(server: Served) -> str:
        async with client(server.url) as http:
            usual = await _answered(http, path, body)
            (worker, *_) = workers = children_running(server.process.pid, f"{part}.py")
            for each in workers:
                harm(each)
            try:
                took = await _answered(http, path, body)
                again = await _answered(http, path, body)
            finally:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()
        assert "Traceback" not in server.log()
        return f"answered in {took:.1f} s, then in {again:.1f} s (usually {usual:.1f})"

    name = f"{'killed' if harm is psutil.Process.kill else 'stopped'}-{part.replace('_worker', '')}"
    return Row(name=name, what=f"the processes {part}, {name.partition('-')[0]}", act=act)


async def spare(server: Served) -> str:
    """The process that waits to be the next engine is killed: another takes its place, and no stream notices."""

    async def another(than: set[int]) -> psutil.Process:
        async with asyncio.timeout(SPARE_SECONDS):
            while True:
                found = [
                    each
                    for each in children_running(server.process.pid, "quire_engine.process")
                    if each.pid not in than
                ]
                if found:
                    return found[0]
                await asyncio.sleep(0.1)

    engine = server.engine().pid
    first = await another({engine})
    first.kill()
    killed = time.monotonic()
    second = await another({engine, first.pid})
    assert second.pid != first.pid
    assert server.metric("quire_engine_restarts_total") == 0
    return f"another waits {time.monotonic() - killed:.0f} s later, no restart"


async def garbage(server: Served) -> str:
    """Two requests in one piece and bytes that are none behind them, a hundred times."""
    address = urlsplit(server.url)
    before = len(server.log())
    for _ in range(100):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(PIPELINED)
        raw = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert raw.count(b"HTTP/1.1 ") == 1, raw
        assert raw.startswith(b"HTTP/1.1 400 "), raw
    logged = (len(server.log()) - before) / 100
    assert logged <= MOST_LOGGED, f"{logged:.0f} bytes are logged for a connection"
    assert "Traceback" not in server.log()
    return f"one refusal each, {logged:.0f} bytes logged for a connection"


async def planted(_: Served) -> str:
    """A server of its own in a folder with a module of each name, and every child that it has."""

    def run(folder: Path) -> None:
        with Served(cwd=folder) as server:
            start_all_children(server)

    with tempfile.TemporaryDirectory() as place:
        number = plant(Path(place))
        await asyncio.to_thread(run, Path(place))
        assert not ran(Path(place)), ran(Path(place))
    return f"0 of {number} ran"


async def signals(_: Served) -> str:
    """SIGINT and SIGTERM by turns, early in starts of their own."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    codes = []
    for at, moment in enumerate(MOMENTS):
        number = numbers[at % 2]
        code = (await asyncio.to_thread(signal_at, moment, number)).split()[0]
        assert code in {"0", str(128 + number)}, (moment, number.name, code)
        codes.append(f"{moment}: {number.name} {code}")
    return f"one line and no process left each; {', '.join(codes)}"


async def stored(server: Served) -> str:
    """One key stores more responses than are kept; the other key's are all there."""
    body = {"input": "a", "max_output_tokens": 1}

    async def store(http: httpx.AsyncClient, number: int) -> str:
        reply = await http.post("/v1/responses", json=body | {"input": f"number {number}"})
        name: str = reply.raise_for_status().json()["id"]
        return name

    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {OTHER}"}) as victim,
        httpx.AsyncClient(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {ONE}"}) as attacker,
    ):
        kept = [await store(victim, number) for number in range(AT_ONCE)]
        for at in range(0, FLOOD, AT_ONCE):
            await asyncio.gather(*(store(attacker, number) for number in range(at, min(at + AT_ONCE, FLOOD))))
        found = [(await victim.get(f"/v1/responses/{name}")).status_code for name in kept]
    assert found == [200] * AT_ONCE, found
    return f"{FLOOD} of one key, {AT_ONCE} of {AT_ONCE} of the other are there"


ROWS = (
    _worker_row("/tokenize", {"prompt": LONG}, "tokenizer_worker", psutil.Process.suspend),
    _worker_row("/v1/chat/completions", CHAT, "template_worker", psutil.Process.kill),
    Row(name="killed-spare", what="the process that waits to be the next engine, killed", act=spare),
    Row(name="pipelined-garbage", what="two requests in one piece, and garbage behind them", act=garbage),
    Row(name="planted-modules", what="a folder with modules of every name", act=planted),
    Row(name="early-signals", what="signals early in a start", act=signals),
    Row(name="stored-flood", what="a flood of stored responses of one key", act=stored, flags=KEYS),
)
