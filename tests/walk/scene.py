"""A server in which one part is about to fail, with what its clients do meanwhile.

Promises: a fault that was to be planted and did not happen is an AssertionError, as is a stream with other tokens than
those of an undisturbed server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from e2e.served import Served
from e2e.streams import client, gather, stream
from support.processes import children_running

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "planted_run.py"
SMALL = ("--kv-memory", "16MiB", "--max-num-seqs", "8", "--set", "engine_hang_timeout=10")
PROMPTS = tuple(f"Part {number} of the machine is" for number in range(3))
PATIENCE = 120.0
START_SECONDS = 240.0
_NAMES_SECONDS = 120.0  # a process that loads libraries answers between two of them
HUGE = "word " * 60_000  # encoded by a process
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def body(prompt: str, max_tokens: int = 120) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def chat(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **more}


class Scene:
    """One server. `folder` is its own, and `golden` what an undisturbed one answers to PROMPTS."""

    def __init__(self, server: Served, folder: Path, golden: list[list[int]], key: str = "") -> None:
        """`key`: of the API, which all clients send; empty: the server asks for none."""
        self.server, self.folder, self.golden, self._key = server, folder, golden, key

    def client(self) -> httpx.AsyncClient:
        http = client(self.server.url)
        if self._key:
            http.headers["Authorization"] = f"Bearer {self._key}"
        return http

    # ---------------------------------------------------------------- its processes

    def processes(self, program: str) -> list[psutil.Process]:
        """Its descendants that run this module or script, the oldest first."""
        return children_running(self.server.process.pid, program, recursive=True)

    async def process(self, program: str) -> psutil.Process:
        """The oldest process of this program, as soon as there is one."""
        await self.until(f"a process {program}", lambda: bool(self.processes(program)))
        return self.processes(program)[0]

    async def replaced(self, program: str, old: psutil.Process) -> None:
        await self.until(f"another {program}", lambda: old.pid not in [each.pid for each in self.processes(program)])

    def names(self, pid: int) -> tuple[set[str], set[str]]:
        """The threads and tasks of one of its processes."""
        file = self.folder / f"{pid}.json"
        file.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
        deadline = time.monotonic() + _NAMES_SECONDS
        while not file.exists():
            assert time.monotonic() < deadline, f"process {pid} does not tell its threads"
            time.sleep(0.02)
        told = json.loads(file.read_text())
        return set(told["threads"]), set(told["tasks"])

    # ---------------------------------------------------------------- what clients do

    async def streams(self, between: Callable[[], Awaitable[None]] | None = None) -> None:
        """All streams have the tokens of an undisturbed server. `between` happens when they have begun."""
        chunks = [0] * len(PROMPTS)

        def count(number: int) -> Callable[[Any], None]:
            return lambda seen: chunks.__setitem__(number, len(seen.token_ids))

        async with self.client() as http:
            running = asyncio.create_task(
                gather(len(PROMPTS), lambda i: stream(http, body(PROMPTS[i]), on_chunk=count(i)))
            )
            if between is not None:
                await self.until("tokens", lambda: min(chunks) >= 10 or running.done())
                await between()
            said = await asyncio.wait_for(running, PATIENCE)
        assert [each.errors for each in said] == [[]] * len(said), "a stream has an error"
        assert [each.token_ids for each in said] == self.golden, "a stream has other tokens"

    async def post(self, path: str, json: dict[str, Any], *, status: int | set[int] = 200) -> httpx.Response:
        """A request that is answered in time, with this status."""
        async with self.client() as http:
            reply = await asyncio.wait_for(http.post(path, json=json), PATIENCE)
        wanted = status if isinstance(status, set) else {status}
        assert reply.status_code in wanted, f"{path}: {reply.status_code} {reply.text[:200]}"
        return reply

    async def get(self, path: str) -> httpx.Response:
        async with self.client() as http:
            return await asyncio.wait_for(http.get(path), PATIENCE)

    async def live(self, *, seconds: float = 0.0) -> None:
        """The server calls itself alive, now and for so long."""
        deadline = time.monotonic() + seconds
        while True:
            reply = await self.get("/health/live")
            assert reply.status_code == 200, reply.text
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(0.2)

    async def beyond_help(self) -> None:
        """The server says that only a new process helps."""
        deadline = time.monotonic() + PATIENCE
        while (reply := await self.get("/health/live")).status_code == 200:
            assert time.monotonic() < deadline, "a task has ended, and the server calls itself alive"
            await asyncio.sleep(0.1)
        assert reply.json()["error"]["code"] == "task_ended", reply.text

    async def logged(self, words: str) -> None:
        await self.until(f"the line {words!r}", lambda: words in self.server.log())

    async def until(self, what: str, is_so: Callable[[], bool], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
            await asyncio.sleep(0.05)

    def fired(self) -> list[str]:
        """The functions in which planted faults have happened."""
        file = self.folder / "fired"
        return file.read_text().splitlines() if file.exists() else []


@contextmanager
def scene(
    golden: list[list[int]],
    *flags: str,
    plants: tuple[dict[str, Any], ...] = (),
    files: dict[str, str] | None = None,
    key: str = "",
) -> Iterator[Scene]:
    """`{folder}` in a flag is a folder of the server's own; `files`: what is in it at the start, by name."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        for file, content in (files or {}).items():
            (Path(name) / file).write_text(content)
        given = [flag.replace("{folder}", name) for flag in (*SMALL, *flags)]
        env = {"WALK_PLAN": json.dumps({"folder": name, "plants": plants})}
        program = (str(PROGRAM), "quire_server.cli", "serve")
        with Served(*given, env=env, program=program, start_seconds=START_SECONDS) as server:
            yield Scene(server, Path(name), golden, key)


async def golden_of(server: Served) -> list[list[int]]:
    async with client(server.url) as http:
        return [(await stream(http, body(prompt))).token_ids for prompt in PROMPTS]
