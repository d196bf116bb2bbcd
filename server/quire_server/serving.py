"""Runs one server and takes it down again: the listener, the banner, the signals, the drain.

Owns SIGTERM and SIGINT. Promises: a signal turns readiness to 503 at once and lets running work finish; a second one
ends it; nothing it started is left. Must not know: routes, sampling, how the engine works.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire_engine.config import EnginePlan
from quire_engine.memory_plan import plan_text
from quire_engine.quality_store import quality_text
from quire_server.app import create_app
from quire_server.engine.supervisor import Supervisor
from quire_server.http import listener
from quire_server.http.listener import Listening
from quire_server.logs import log_throughput
from quire_server.settings import Settings
from quire_server.state import ServerState, build_state

log = logging.getLogger("quire")


async def serve(settings: Settings, supervisor: Supervisor, starting: asyncio.Task[EnginePlan]) -> bool:
    """Serve until a signal (True) or until the engine is given up (False). Raises ConfigError and ModelLoadError."""
    sock = listener.bind(settings)
    with contextlib.closing(sock), _signals() as stop:
        building = asyncio.create_task(build_state(settings, supervisor, starting))
        await _first(building, stop.asked)
        if not building.done():
            await _cancel(building)
            return True
        state = building.result()
        started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            listener.serve(create_app(state), settings, sock=sock, on_started=started.set_result), name="listener"
        )
        stats = asyncio.create_task(log_throughput(state.metrics, settings.log_stats_interval), name="stats")
        try:
            await _first(started, serving)
            if started.done():
                listening = started.result()
                # What was imported and built stays: collections need not look at it again between two tokens.
                gc.collect()
                gc.freeze()
                _greet(settings, state, listening)
                await _first(stop.asked, supervisor.dead, serving)
                await _drain(settings, state, supervisor, stop)
                listening.stop(False)
                await _first(serving, stop.insisted)
                listening.stop(True)
            await serving
        finally:
            await _cancel(serving, stats)
    return not supervisor.dead.done()


async def _drain(settings: Settings, state: ServerState, supervisor: Supervisor, stop: _Stop) -> None:
    """Let running requests finish; when time is up or a second signal comes, end them with an error each."""
    state.draining = True
    log.info(
        "draining %d requests for up to %g s; Ctrl-C again to stop now", state.client.in_flight, settings.drain_timeout
    )
    idle = asyncio.create_task(state.client.wait_idle())
    await _first(idle, stop.insisted, supervisor.dead, seconds=settings.drain_timeout)
    if not idle.done():
        log.warning("ending %d requests that have not finished", state.client.in_flight)
        await supervisor.stop()
    await _cancel(idle)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """The operator's wish, in two degrees: a first signal and a second one."""

    asked: asyncio.Future[None]
    insisted: asyncio.Future[None]


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    loop = asyncio.get_running_loop()
    stop = _Stop(asked=loop.create_future(), insisted=loop.create_future())

    def received(number: signal.Signals) -> None:
        log.info("received %s", number.name)
        for degree in (stop.asked, stop.insisted):
            if not degree.done():
                degree.set_result(None)
                return

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _first(*futures: asyncio.Future[Any], seconds: float | None = None) -> None:
    """Until one of them is done."""
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _greet(settings: Settings, state: ServerState, listening: Listening) -> None:
    """What was decided, and a call to try; the listener has said where."""
    plan = state.client.plan
    quality = quality_text(plan.checkpoint, plan.quantization, plan.kv_cache_dtype)
    for line in plan_text(plan, quality).splitlines():
        log.info("%s", line)
    log.info("try: %s", example(settings, state, listening))


def example(settings: Settings, state: ServerState, listening: Listening) -> str:
    """A curl command that this server answers."""
    where = listening.address
    if settings.uds is not None:
        scheme = "http" if settings.ssl_certfile is None else "https"
        where = f"--unix-socket {settings.uds} {scheme}://localhost"
    if settings.ssl_certfile is not None:
        where = f"--insecure {where}"  # the certificate is for a name that is not known here
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.needs_key else ""
    model = state.model_names[0]
    if state.prompts is None:
        path, body = "completions", f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 40}}'
    else:
        path = "chat/completions"
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"curl {where}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
