"""What a server answers, with a real engine behind it: the other side of comparisons with the offline API.

Promises: the whole application, called without sockets; nothing that is started here is left running. The engine of
`served_answers` and its loop run in a thread of this process, which has imported torch already. Must not know: the
offline API.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import StepOutput
from quire_engine.engine import Engine
from quire_engine.process.loop import EngineLoop
from quire_engine.process.transport import FrameDecoder
from quire_server.app import create_app
from quire_server.engine import supervisor
from quire_server.engine.connection import EngineConnection
from quire_server.engine.supervisor import Supervisor
from quire_server.settings import Settings
from quire_server.state import ServerState, build_state
from support.fakes import connect


def served_answers(requests: Sequence[tuple[str, dict[str, Any]]], **settings: object) -> list[dict[str, Any]]:
    """The replies to (path, body), all asked for at once, of a server with these settings."""
    with engines_in_threads():
        return asyncio.run(_answers(requests, Settings(**settings)))


async def _answers(requests: Sequence[tuple[str, dict[str, Any]]], settings: Settings) -> list[dict[str, Any]]:
    engine = Supervisor(settings.engine_config())
    state = await build_state(settings, engine, asyncio.create_task(engine.start()))
    try:
        return await answers_of(state, requests)
    finally:
        await engine.stop()
        state.model_text.close()


async def answers_of(state: ServerState, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The replies to (path, body), all asked for at once, of a server over this engine; on the state's event loop."""
    async with connect(create_app(state), timeout=120, headers={"host": "localhost"}) as client:
        replies = await asyncio.gather(*(client.post(path, json=body) for path, body in requests))
    for reply in replies:
        assert reply.status_code == 200, reply.text
    return [reply.json() for reply in replies]


@contextmanager
def engines_in_threads() -> Iterator[None]:
    """Every supervisor's engine is a thread of this process, for tests of what engines answer."""
    with mock.patch.object(supervisor, "EngineProcess", _EngineThread):
        yield


class _EngineThread(EngineConnection):
    """Stands for `EngineProcess`: the same loop and frames. An engine that cannot be built fails the test."""

    pid = None
    runs = True

    def __init__(self, program: Sequence[str], on_step: Callable[[StepOutput], None], **launch: object) -> None:
        super().__init__(on_step)
        self._socket, self._theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._thread: threading.Thread | None = None

    async def start(self, config: EngineConfig, stall_seconds: float, *, memory: object) -> EnginePlan:
        self._thread = threading.Thread(target=_run, args=(config, self._theirs), name="engine")
        self._thread.start()
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)
        answer = await self._answer
        assert isinstance(answer, EnginePlan), answer
        return answer

    async def wait_for_end(self, hang_seconds: object, absent_seconds: object) -> None:
        await self._lost

    async def reap(self, *, grace_seconds: float) -> None:
        self.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            return
        self._socket.close()
        self._theirs.close()


def _run(config: EngineConfig, connection: socket.socket) -> None:
    with connection:
        built = build(config)
        engine = Engine(
            built.scheduler,
            built.executor,
            grammars=built.grammars,
            adapters=built.adapters,
            check_invariants=config.check_invariants,
        )
        loop = EngineLoop(engine, connection, FrameDecoder())
        loop.send(built.plan)
        loop.run([])
        built.close()
