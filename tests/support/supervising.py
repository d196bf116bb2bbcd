"""A supervisor over the fake engine process, and a client that collects what it delivers.

Promises: the engine's process is gone when `supervised` ends; an output after the last one fails the test.
Must not know: how an engine is restarted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams, TokenOutput
from quire_server.engine import process
from quire_server.engine.kv_events.events import CacheListener
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import EngineState, Spare, Supervisor
from support.fake_engine_process import main, next_token
from support.forking import launching

FAKE = (sys.executable, str(Path(__file__).resolve().parent / "fake_engine_process.py"))
process.subprocess = launching(FAKE, main)  # type: ignore[assignment]


class Client:
    """Collects outputs per (request, choice)."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], TokenOutput] = {}
        self._changed = asyncio.Event()

    def on_step(self, step: StepOutput) -> None:
        for output in step.outputs:
            key = (output.request_id, output.choice)
            assert key not in self.ends, f"{key} got an output after its last"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish is not None:
                self.ends[key] = output
        self._changed.set()

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def request(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), tokens: int = 40, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=tokens),
        n=n,
    )


def expected(prompt: tuple[int, ...], tokens: int, choice: int = 0) -> list[int]:
    known = list(prompt)
    for _ in range(tokens):
        known.append(next_token(known, choice))
    return known[len(prompt) :]


@asynccontextmanager
async def supervised(
    model: str = "ok",
    *,
    listener: CacheListener | None = None,
    spare: Spare | None = None,
    kind: type[Any] = Supervisor,
    **policy: float,
) -> AsyncIterator[tuple[Any, Client]]:
    settings = {"first_backoff_seconds": 0.01, **policy}
    supervisor = kind(
        EngineConfig(model=model),
        RestartPolicy(**settings),  # type: ignore[arg-type]
        program=FAKE,
        listener=listener,
        spare=spare,
    )
    client = Client()
    supervisor.on_step = client.on_step
    await supervisor.start()
    try:
        yield supervisor, client
    finally:
        await supervisor.stop()


async def reached(supervisor: Supervisor, state: EngineState) -> None:
    async with asyncio.timeout(300):
        while supervisor.state is not state:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 300))


def send_garbage(supervisor: Supervisor) -> None:
    assert supervisor._process is not None
    supervisor._process.data_received(b"\xff" * 64)
