"""Runs one server and shuts it down: the listener, the banner, the drain.

Owns SIGHUP. Promises: the port answers before heavy imports; a signal to stop turns readiness to 503 at once and lets
running requests finish; a second one ends them, with an error to each client; no process or thread is left behind.
Must not know: routes, sampling.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from quire_engine.memory_plan import plan_text, summary_text
from quire_engine.quality_store import quality_text
from quire_server.background import begin
from quire_server.engine.engines import Engines
from quire_server.errors import BadRequest
from quire_server.http import listener
from quire_server.http.credentials import Credentials
from quire_server.http.guard import Reply
from quire_server.http.listener import CLOSING_SECONDS, Listening
from quire_server.http.overload import OpenRequests, ended
from quire_server.http.starting import AppSwitch, StartProgress, starting_app
from quire_server.logs.requests import log_order, log_reply, log_signal
from quire_server.logs.throughput import log_throughput
from quire_server.metrics.metrics import while_loading
from quire_server.programs.service_manager import service_manager
from quire_server.programs.several_launch import SeveralEngines
from quire_server.programs.stopping import Stop, first_of
from quire_server.programs.warming import warm
from quire_server.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from quire_server.api_servers.fleet import ApiServers
    from quire_server.engine.models.model_set import ModelSet
    from quire_server.state import ServerState
    from quire_server.text.generation_config import GenerationDefaults

# Seconds of a stop after the drain; together with the engine's end, which comes last, less than five.
LAST_WORDS_SECONDS = 1.5  # for clients to read the error with which their requests end
_LAST_SECONDS = 0.5  # for what API servers do beside that
_STDERR = 2

log = logging.getLogger("quire")


async def serve(settings: Settings, engines: Engines | SeveralEngines, starting: asyncio.Task[Any], stop: Stop) -> bool:
    """Serve until a signal (True) or until the engine has failed for good (False).

    Raises ConfigError and ModelLoadError.
    """
    credentials = Credentials(settings)
    began = time.monotonic()
    switch = AppSwitch(_while_starting(settings, engines, credentials, began))
    with _reloads(credentials, stop):
        async with (
            service_manager(stop.asked, lambda: f"loading: {_progress(engines, began)}") as manager,
            _listening(switch, settings, credentials) as (listening, listener_task, others),
        ):
            log.info("listening on %s; until the model is loaded requests get 503", listening.where)
            building = asyncio.create_task(_build(settings, engines, starting, credentials))
            await first_of(building, stop.asked, listener_task)
            if not building.done():
                await _cancel(building)
                return True
            state, app = building.result()
            switch.watch_connections(state.metrics.connections)
            state.metrics.bytes_waiting = listening.bytes_waiting
            state.metrics.num_stalled = listening.num_stalled
            await switch.open(app)
            if others is not None and not isinstance(engines, SeveralEngines):
                others.open(state, engines)
            stats = [
                begin(partial(log_throughput, each.metrics, each.limits.log_stats_interval, name), "stats")
                for each in state.every
                for name in ("" if state.catalog is None else each.model_names[0],)
            ]
            try:
                # Imported and built objects stay alive: freeze them, so that later collections do not scan them.
                gc.collect()
                gc.freeze()
                listener.announce(listening)
                manager.ready(f"serving {settings.model_names[0]} on {listening.where}")
                _greet(settings, state, listening)
                await first_of(stop.asked, engines.dead, listener_task)
                await _wind_up(settings, state, engines, app.state.requests, stop, others=others)
            finally:
                await _cancel(*stats)
    return not engines.dead.done()


@contextlib.asynccontextmanager
async def _listening(
    switch: AppSwitch, settings: Settings, credentials: Credentials
) -> AsyncIterator[tuple[Listening, asyncio.Future[None], ApiServers | None]]:
    """Open the listener, here or in API servers; on exit, wait briefly for replies that are being sent."""
    if settings.api_server_count == 1:
        async with listener.listening_on(listener.bind(settings), switch, settings, credentials) as (
            listening,
            serving,
        ):
            yield listening, serving, None
        return
    from quire_server.api_servers.fleet import ApiServers  # noqa: PLC0415 - only where there are any

    sockets = listener.bind_for(settings, settings.api_server_count)
    address, port = listener.address_of(sockets[0], settings)
    others = ApiServers(settings, credentials, switch, sockets)
    try:
        await others.listen()
        listening = Listening(
            address=address, port=port, stop=lambda _: None, bytes_waiting=lambda: 0, num_stalled=lambda: 0
        )
        yield listening, asyncio.get_running_loop().create_future(), others
    finally:
        await others.close(CLOSING_SECONDS + _LAST_SECONDS)
        await switch.close()
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)


def _progress(engines: Engines | SeveralEngines, began: float) -> StartProgress:
    """The progress of a start that began at a time of the monotonic clock."""
    current, elapsed = engines.progress, time.monotonic() - began
    if current is None:
        return StartProgress(phase="starting", done=0, total=0, unit="", elapsed_seconds=elapsed)
    return StartProgress(
        phase=current.phase, done=current.done, total=current.total, unit=current.unit, elapsed_seconds=elapsed
    )


def _while_starting(
    settings: Settings, engines: Engines | SeveralEngines, credentials: Credentials, began: float
) -> ASGIApp:
    """The application that reports the progress of the start."""

    def progress() -> StartProgress:
        return _progress(engines, began)

    def on_reply(reply: Reply) -> None:
        log_order(reply, settings.root_path)
        if not settings.disable_access_log:
            log_reply(reply, None, name)

    name = settings.model_names[0]
    metrics = lambda: while_loading(name, progress().ratio or 0.0)  # noqa: E731
    return starting_app(settings, progress, metrics, on_reply, credentials)


async def _build(
    settings: Settings, engines: Engines | SeveralEngines, starting: asyncio.Task[Any], credentials: Credentials
) -> tuple[ServerState, FastAPI]:
    """Assemble the server's application; its imports take about a second."""
    create_app, build_state, build_catalog = await asyncio.to_thread(_application)
    if isinstance(engines, SeveralEngines):
        models: ModelSet = await starting
        state = await build_catalog([entry.settings for entry in engines.entries], models, credentials)
    else:
        state = await build_state(settings, engines, starting, credentials)
    app: FastAPI = create_app(state)
    if settings.warm_prefix is not None:
        await warm(state, app, settings.warm_prefix)
    return state, app


def _application() -> Any:
    from quire_server.app import create_app  # noqa: PLC0415  # heavy: the port listens and the engine starts meanwhile
    from quire_server.state import build_catalog, build_state  # noqa: PLC0415

    return create_app, build_state, build_catalog


async def _wind_up(
    settings: Settings,
    state: ServerState,
    engines: Engines | SeveralEngines,
    requests: OpenRequests,
    stop: Stop,
    *,
    others: ApiServers | None = None,
) -> None:
    """Wait for accepted requests; after the drain timeout or a second signal, end them with an error."""
    state.phase.draining = state.phase.stopping = True
    await state.settle()
    work = requests.work()
    num_open = max(state.in_flight, len(work))
    log.info("draining %d requests for up to %g s; Ctrl-C again to stop now", num_open, settings.drain_timeout)
    # Requests in preparation count as accepted, like requests in the engine.
    idle = asyncio.create_task(_idle(state, work, others))
    await first_of(idle, stop.insisted, engines.dead, seconds=settings.drain_timeout)
    if not idle.done():
        log.warning("ending %d requests that have not finished", sum(1 for task in work if not task.done()))
    # Clients get their errors first: that needs no engine, and stopping the engine may take as long as a step.
    for each in state.every:
        each.client.close()
    stopping = asyncio.create_task(engines.stop())
    await first_of(idle, seconds=LAST_WORDS_SECONDS)
    requests.refuse_unanswered()
    if others is not None:
        await others.order("refuse", _LAST_SECONDS)
    await _cancel(idle)
    await stopping


async def _idle(state: ServerState, work: tuple[asyncio.Task[Any], ...], others: ApiServers | None) -> None:
    await ended(work)
    if others is not None:
        await others.order("idle")
    for each in state.every:
        await each.client.wait_idle()


@contextlib.contextmanager
def _reloads(credentials: Credentials, stop: Stop) -> Iterator[None]:
    """Handle SIGHUP as an order to read keys and certificates again, or as a stop if the terminal was closed."""
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()
    has_terminal = os.isatty(_STDERR)

    def received() -> None:
        if has_terminal and not os.isatty(_STDERR):
            stop.received(signal.SIGHUP)
            return
        task = asyncio.create_task(_reload(credentials), name="reload")
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, received)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _reload(credentials: Credentials) -> None:
    """The order of a signal; a file that cannot be used has its line in the log."""
    try:
        await credentials.reload()
        status = 200
    except BadRequest as refusal:
        status = refusal.status
    log_signal("reload", signal.SIGHUP.name, status)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _greet(settings: Settings, state: ServerState, listening: Listening) -> None:
    """Log what is served and how to call it; the listener has logged the address. The whole plan is for --verbose."""
    for each in state.every:
        plan = each.client.plan
        log.info("model %s: %s%s", each.model_names[0], summary_text(plan), _defaults_text(each.model_text.defaults))
        for line in plan_text(plan, quality_text(plan)).splitlines():
            log.debug("%s", line)
    has_page = state.model_text.prompts is not None and settings.uds is None
    chat = f"chat at {listening.address}/ or with `quire chat`; " if has_page else ""
    is_closed = settings.needs_key and not settings.admin_keys and not settings.allow_local_admin
    closed = "/debug, /admin and the dashboard's data need --admin-api-key; " if is_closed else ""
    log.info("%s%stry: %s", chat, closed, example(settings, state, listening))


def _defaults_text(defaults: GenerationDefaults) -> str:
    """The model's own sampling defaults and where they are from, for the end of its line; empty if it has none."""
    if not defaults.source:
        return ""
    numbers = ", ".join(f"{name} {value:g}" for name, value in defaults.shown.items())
    return f"; defaults of requests: {numbers} (from {defaults.source})"


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
    if state.model_text.scoring.classifier is not None:
        path, body = "classify", f'{{"model": "{model}", "input": "Once upon a time"}}'
        return f"curl {where}/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
    if state.client.plan.scheduler.why_no_text:
        path, body = "embeddings", f'{{"model": "{model}", "input": "Once upon a time"}}'
    elif state.model_text.prompts is None:
        path, body = "completions", f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 40}}'
    else:
        path = "chat/completions"
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"curl {where}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
