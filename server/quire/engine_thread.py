"""The event loop of one LLM, in a thread of its own, and the supervisor of its engine process.

Owns the loop, the thread, the supervisor. Promises: works inside a caller's own event loop and without a `__main__`
guard; an interrupted call is cancelled and the next one works; nothing is left behind after `close`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from os import getpid
from typing import Any, TypeVar

from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import Supervisor
from quire_server.http.event_loop import loop_factory
from quire_server.settings import Settings
from quire_server.state import ServerState, build_state

T = TypeVar("T")


class EngineThread:
    """Runs coroutines in its event loop for callers that wait for the results."""

    def __init__(self) -> None:
        self._pid = getpid()
        self._closed = False
        self._submitting = threading.Lock()  # so that `close` sees every call that was not refused
        self._supervisor: Supervisor | None = None
        self._state: ServerState | None = None
        self._loop = loop_factory()()
        # A daemon, since the interpreter joins other threads before it runs exit handlers.
        self._thread = threading.Thread(target=self._run, name="quire", daemon=True)
        self._thread.start()

    async def open(self, settings: Settings) -> ServerState:
        """Start the engine and load the text half beside it. Raises ConfigError, ModelLoadError, EngineDead."""
        policy = RestartPolicy(max_restarts=settings.max_engine_restarts, hang_seconds=settings.engine_hang_timeout)
        self._supervisor = Supervisor(settings.engine_config(), policy)
        starting = asyncio.create_task(self._supervisor.start())
        try:
            self._state = await build_state(settings, self._supervisor, starting)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        return self._state

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An exception during the wait, such as Ctrl-C, cancels the coroutine."""
        with self._submitting:
            if self._closed or getpid() != self._pid:
                coroutine.close()
                reason = "is closed" if self._closed else "works only in the process that made it"
                raise RuntimeError(f"this LLM {reason}")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("this LLM was closed while it was at work") from None
        finally:
            future.cancel()  # has no effect after its end

    def close(self) -> None:
        """End the engine process and the thread. Call it once; running calls are cancelled."""
        if getpid() != self._pid:  # a fork has neither the thread nor the engine
            return
        with self._submitting:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if threading.current_thread() is not self._thread:  # the garbage collector may run anywhere
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self) -> None:
        try:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._supervisor is not None:
                await self._supervisor.stop()
            if self._state is not None:
                self._state.model_text.close()
        finally:
            self._loop.stop()
