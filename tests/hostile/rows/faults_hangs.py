"""What stands still or comes back broken: stopped engines and workers, starts that hang or fail, bytes without sense.

Promises: processes are stopped by their ids, and continued where they are left. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
import psutil

from e2e.served import Served
from e2e.streams import Streamed, client, gather, stream
from hostile.row import Row
from support.processes import children_running

SMALL = "--max-num-seqs", "8", "--kv-memory", "32MiB"
GARBAGE = "--set", "enable_fault_injection=ipc.garbage@40", *SMALL
NO_TEXT = "--set", "enable_fault_injection=detok.raise@100", *SMALL
HELD_WORKERS = "--set", "enable_fault_injection=template.hang@4,grammar.hang@1", *SMALL
HELD_START = "--set", "enable_fault_injection=start.hang@1", *SMALL
T = TypeVar("T")
PATIENCE = 120.0  # seconds that a row waits for what it is to see


def _body(number: int = 0, max_tokens: int = 300) -> dict[str, Any]:
    return {
        "model": "quire-demo",
        "prompt": f"Number {number} of the stories is",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me a story."}]
    return {"model": "quire-demo", "messages": messages, "max_tokens": 8, "temperature": 0, **more}


async def _in_time(what: str, awaitable: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(awaitable, PATIENCE)
    except TimeoutError:
        raise AssertionError(f"{what}: nothing for {PATIENCE:.0f} s") from None


async def _first_seen(http: httpx.AsyncClient, *, ready: bool) -> float:
    """The moment at which readiness is so."""
    async with asyncio.timeout(PATIENCE):
        while ((await http.get("/health/ready")).status_code == 200) is not ready:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return time.monotonic()


async def stopped_engine(server: Served) -> str:
    """SIGSTOP to the engine's process under four streams."""
    async with client(server.url) as http:
        golden = [(await stream(http, _body(i))).token_ids for i in range(4)]
        tokens = [0] * 4

        def on_chunk(i: int) -> Any:
            return lambda seen: tokens.__setitem__(i, len(seen.token_ids))

        tasks = [asyncio.create_task(stream(http, _body(i), on_chunk=on_chunk(i))) for i in range(4)]
        while min(tokens) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        engine = server.engine()
        engine.suspend()
        stopped = time.monotonic()
        try:
            unready = await _first_seen(http, ready=False) - stopped
            async with asyncio.timeout(PATIENCE):
                while engine.is_running() and engine.status() == psutil.STATUS_STOPPED:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            noticed = time.monotonic() - stopped
            ended: list[Streamed] = await asyncio.gather(*tasks)
        finally:
            with suppress(psutil.NoSuchProcess):
                engine.kill()
    resumed = time.monotonic() - stopped
    assert [each.token_ids for each in ended] == golden, "a stream did not go on as it was"
    assert unready <= 5.0, f"ready for {unready:.1f} s"
    assert noticed <= 10.0, f"noticed after {noticed:.1f} s"
    assert "stopped by a signal" in server.log()
    return (
        f"not ready after {unready:.1f} s, killed after {noticed:.1f} s, 4 streams identical, ended at {resumed:.1f} s"
    )


async def stopped_worker(server: Served) -> str:
    """SIGSTOP to the processes that render chat templates, then four chats."""
    workers = children_running(server.process.pid, "template_worker.py")
    assert workers
    async with client(server.url) as http:
        (await http.post("/v1/chat/completions", json=_chat())).raise_for_status()
        for worker in workers:
            worker.suspend()
        seconds = []
        try:
            for _ in range(4):
                started = time.monotonic()
                reply = await _in_time("a chat", http.post("/v1/chat/completions", json=_chat()))
                seconds.append(time.monotonic() - started)
                assert reply.status_code == 200, reply.text
        finally:
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
    assert max(seconds) <= 3.0, seconds
    return f"4 chats answered 200 after {', '.join(f'{each:.2f}' for each in seconds)} s"


async def held_restart(server: Served) -> str:
    """The engine is killed, and the one that is started in its place is stopped before it is ready."""
    async with client(server.url) as http:
        wanted = (await stream(http, _body())).token_ids
        task = asyncio.create_task(stream(http, _body()))
        await asyncio.sleep(0.3)
        first = server.engine()
        first.kill()
        killed = time.monotonic()
        async with asyncio.timeout(PATIENCE):
            while (second := await asyncio.to_thread(server.engine)).pid == first.pid:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        second.suspend()
        try:
            seen: Streamed = await _in_time("the stream", task)
        finally:
            with suppress(psutil.NoSuchProcess):
                second.kill()
    assert seen.token_ids == wanted
    return f"the stream went on, identical, {time.monotonic() - killed:.1f} s after the kill; engines started: 3"


async def held_start(server: Served) -> str:
    """The first start hangs, with 4 s to get on; the server is up by now, or this would not run."""
    assert server.log().count("has not got on") == 1
    async with client(server.url) as http:
        (await http.post("/v1/completions", json=_body(max_tokens=4))).raise_for_status()
    return f"killed and started again; ready {server.ready_seconds:.1f} s after its launch"


async def crash_loop(_: Served) -> str:
    """A server whose engine ends at every start."""
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command, "--set", "enable_fault_injection=start.fail", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    started = time.monotonic()
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    lines = output.decode().splitlines()
    said = [line for line in lines if line.startswith("quire serve: ")]
    assert process.returncode == 70, process.returncode
    assert len(said) == 1, lines
    assert "Traceback" not in output.decode()
    return f"exit code 70 after {time.monotonic() - started:.0f} s: {said[0]}"


async def garbage(server: Served) -> str:
    """Bytes from the engine that are no frame, in the middle of four streams."""
    async with client(server.url) as http:
        got = await gather(4, lambda i: stream(http, _body(i)))
        again = await gather(4, lambda i: stream(http, _body(i)))
    assert [each.errors for each in got] == [[]] * 4
    assert [each.token_ids for each in got] == [each.token_ids for each in again]
    restarts = server.metric("quire_engine_restarts_total")
    assert restarts == 1
    return f"{restarts:.0f} restart, 4 streams identical"


async def no_text(server: Served) -> str:
    """A token that cannot be turned into text, in one of four streams."""
    async with client(server.url) as http:
        got = await gather(4, lambda i: stream(http, _body(i)))
        again = await gather(4, lambda i: stream(http, _body(i)))
    failed = [i for i, each in enumerate(got) if each.errors]
    assert len(failed) == 1, failed
    assert got[failed[0]].errors[0]["code"] == "internal_error"
    assert all(got[i].token_ids == again[i].token_ids for i in range(4) if i not in failed)
    assert [each.errors for each in again] == [[]] * 4
    server.wait_idle()
    return "one stream ends with an error event, 3 identical, 0 restarts"


async def held_workers(server: Served) -> str:
    """A worker that stands still in a chat, and one in a grammar."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "maxLength": 3}}}
    seconds = {}
    async with client(server.url) as http:
        for name, body in {"template": _chat(), "grammar": _chat(response_format=schema)}.items():
            started = time.monotonic()
            for _ in range(4):
                reply = await http.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
            seconds[name] = time.monotonic() - started
        assert (await http.get("/health/ready")).status_code == 200
    return ", ".join(f"{name}: 4 chats in {each:.1f} s" for name, each in seconds.items())


ROWS = (
    Row(name="stopped-engine", what="an engine that is stopped", act=stopped_engine, flags=SMALL),
    Row(name="stopped-template-worker", what="template processes that are stopped", act=stopped_worker, flags=SMALL),
    Row(name="held-restart", what="an engine that hangs while it restarts", act=held_restart, flags=SMALL),
    Row(
        name="held-start",
        what="an engine that hangs while it starts",
        act=held_start,
        flags=HELD_START,
        limits="start_seconds=4",
    ),
    Row(name="crash-loop", what="an engine that ends at every start", act=crash_loop),
    Row(name="garbage", what="an engine that sends garbage", act=garbage, flags=GARBAGE),
    Row(name="no-text", what="a token without a text", act=no_text, flags=NO_TEXT),
    Row(name="held-workers", what="workers that stand still at work", act=held_workers, flags=HELD_WORKERS),
)
