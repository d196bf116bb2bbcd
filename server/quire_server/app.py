"""Assembles the HTTP application: routes, error replies, layers.

Every error reply has the envelope of its path, whichever layer made it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from quire_server.answering.deep_check import DeepCheck
from quire_server.background import begin
from quire_server.dialects.chat import routes as chat
from quire_server.dialects.common import show_model_defaults
from quire_server.dialects.completions import routes as completions
from quire_server.dialects.image_placeholder import image_placeholder
from quire_server.dialects.infill import routes as infill
from quire_server.dialects.messages import routes as messages
from quire_server.dialects.ollama import routes as ollama
from quire_server.dialects.responses import routes as responses
from quire_server.dialects.responses.store import ResponseStore
from quire_server.dialects.vectors import routes as vectors
from quire_server.engine.replicas import ReplicaSet
from quire_server.errors import (
    ApiError,
    BadRequest,
    ClientGone,
    MethodNotAllowed,
    QueueFull,
    RouteNotFound,
    internal_error,
)
from quire_server.http import openapi
from quire_server.http.access import checks_hosts, layers
from quire_server.http.body import BodyReader
from quire_server.http.body_limits import BodyLimits
from quire_server.http.door import Door
from quire_server.http.envelopes import error_reply
from quire_server.http.guard import PUBLIC_PATHS, Reply
from quire_server.http.head import HeadAsGet
from quire_server.http.memory import MemoryReturn
from quire_server.http.overload import OpenRequests, RefuseWhenFull, Underway
from quire_server.learning.watch import Watch
from quire_server.logs import lost_lines
from quire_server.logs.otlp_metrics import RequestMeters
from quire_server.logs.requests import StoryTeller, log_order, log_reply, story_of
from quire_server.logs.tracing import Tracing
from quire_server.metrics.metrics import Metrics
from quire_server.metrics.request_record import CURRENT, RequestStory, totals
from quire_server.routes import (
    adapters,
    admin,
    batches,
    dashboard,
    debug,
    files,
    health,
    learn,
    loading,
    metrics,
    models,
    pages,
    requests,
    slots,
    tokens,
    usage,
)
from quire_server.routes.dashboard import Feed
from quire_server.routes.elsewhere import advice
from quire_server.showing.version import VERSION
from quire_server.state import ServerState
from quire_server.text.markdown import MarkdownRenderer

ROUTERS = (
    completions.router,
    chat.router,
    vectors.router,
    infill.router,
    responses.router,
    messages.router,
    ollama.router,
    models.router,
    slots.router,
    requests.router,
    adapters.router,
    tokens.router,
    files.router,
    batches.router,
    usage.router,
    health.router,
    metrics.router,
    debug.router,
    admin.router,
    loading.router,
    pages.router,
    dashboard.router,
    learn.router,
)
Collectors = tuple[Tracing | RequestMeters, ...]
STALL_PROBE_SECONDS = 0.1
_MOST_ROUTES = 4  # of a request's prompts, told in one header
SECOND = 1.0  # between two messages to the dashboard
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})  # others share one metric label


def create_app(state: ServerState) -> FastAPI:
    """The application around a built state, whose parts are running already."""
    collectors = _collectors(state)
    state.metrics.lost_log_lines = lost_lines

    app = FastAPI(
        title="Quire",
        version=VERSION,
        lifespan=lambda app: _lifespan(app, state, collectors),
        redirect_slashes=False,  # a redirect is built from the client's Host header
        docs_url=None,  # the framework's page loads its scripts from elsewhere; ours is in `pages`
        redoc_url=None,
    )
    app.state.quire = state
    app.state.responses = ResponseStore(
        max_responses=state.settings.response_store_size, max_bytes=state.limits.response_store_bytes
    )
    bodies = BodyLimits(
        max_body_bytes=state.settings.max_body_bytes,
        max_model_len=max(each.max_model_len for each in state.every),
        root_path=state.settings.root_path,
        max_file_bytes=None if state.settings.batch_dir is None else state.limits.max_file_bytes,
    )
    placeholder = state.settings.image_placeholder
    app.state.bodies = BodyReader(bodies, None if placeholder is None else image_placeholder(placeholder))
    app.state.feed = Feed()
    app.state.deep_check = DeepCheck()
    app.state.watch = Watch(state.engines, state.names)
    app.state.markdown = MarkdownRenderer()
    app.state.requests = OpenRequests()
    app.state.batches = batches.batch_service(state, app, max_line_bytes=bodies.largest)
    for router in ROUTERS:  # their routes as they are: `include_router` would make each anew for every app
        app.router.routes.extend(router.routes)
    _handle_errors(app)
    _document(app, state, bodies)
    _guard(app, state, bodies, collectors)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI, state: ServerState, collectors: Collectors) -> AsyncIterator[None]:
    """The server's own tasks, from the first request to the last one."""
    watch = asyncio.create_task(watch_event_loop(state.metrics), name="event-loop-watch")
    others = [each.metrics for each in state.every[1:]]
    seconds = asyncio.create_task(tell_seconds(state.metrics, app.state.feed, others), name="seconds")
    usage = asyncio.create_task(state.metrics.usage.keep(), name="usage")
    memory = begin(MemoryReturn(state.metrics.memory_given_back).run, "memory")
    state.tasks = [watch, seconds, usage]  # not `memory`, without which the server works
    if state.catalog is not None:
        state.tasks.append(asyncio.create_task(state.catalog.models.run(), name="models"))
    service: batches.BatchService | None = app.state.batches
    if service is not None:
        state.tasks.append(asyncio.create_task(service.runner.run(), name="batches"))
    try:
        yield
    finally:
        running = [*state.tasks, memory]
        state.tasks = []
        for task in running:
            task.cancel()
        if service is not None:
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.to_thread(service.store.close)
        await asyncio.to_thread(app.state.markdown.close)
        await asyncio.to_thread(state.metrics.usage.close)
        for each in state.every:
            each.text.close()
        await asyncio.gather(*(asyncio.to_thread(each.close) for each in collectors))


def _collectors(state: ServerState) -> Collectors:
    """The exporters of requests to OpenTelemetry's collectors."""
    settings, model = state.settings, state.model_names[0]
    found: list[Tracing | RequestMeters] = []
    if settings.otlp_traces_endpoint is not None:
        found.append(Tracing(settings.otlp_traces_endpoint, model=model))
    if settings.otlp_metrics_endpoint is not None:
        found.append(RequestMeters(settings.otlp_metrics_endpoint, model=model))
    return tuple(found)


async def watch_event_loop(metrics: Metrics) -> None:
    """Measure how late the event loop runs a timer, until cancelled: every stream has the same delay."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + STALL_PROBE_SECONDS
        await asyncio.sleep(STALL_PROBE_SECONDS)
        metrics.loop_stall(max(0.0, loop.time() - due))


async def tell_seconds(metrics: Metrics, feed: Feed, others: Sequence[Metrics] = ()) -> None:
    """End a second of the metrics' history every second and publish it to the dashboard, until cancelled.

    `others`: of other models, whose history is not shown.
    """
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + SECOND, loop.time())  # missed seconds are skipped
        await asyncio.sleep(due - loop.time())
        for each in others:
            each.tick()
        feed.publish(metrics.tick())


def _handle_errors(app: FastAPI) -> None:
    async def reply(request: Request, error: Exception) -> Response:
        api_error = _api_error(error, request.scope["path"].removeprefix(request.scope["root_path"]))
        if isinstance(api_error, MethodNotAllowed):
            api_error.headers["Allow"] = _methods_of(request) or api_error.headers.get("Allow", "")
        if isinstance(api_error, RouteNotFound) and (target := _without_slash(request)):
            return Response(status_code=HTTPStatus.TEMPORARY_REDIRECT, headers={"Location": target})
        return error_reply(api_error, request.scope)

    for kind in (ApiError, RequestValidationError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, reply)


def _api_error(error: Exception, path: str) -> ApiError:
    match error:
        case ApiError():
            return error
        case RequestValidationError():  # a path or query parameter; bodies are validated by `json_body`
            return BadRequest("; ".join(f"{e['loc'][-1]}: {e['msg']}" for e in error.errors()[:10]))
        case ClientDisconnect():
            return ClientGone()
        case HTTPException(status_code=RouteNotFound.status):
            return RouteNotFound(" ".join(filter(None, ("There is no such route.", advice(path)))))
        case HTTPException(status_code=MethodNotAllowed.status):
            return MethodNotAllowed("This route does not have that method.", headers=error.headers)
    return internal_error()


def _methods_of(request: Request) -> str:
    """The methods of the path: the framework reports only those of the first route with it."""
    methods = {method for route in _routes_of(request.scope) for method in route.methods or ()}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


def _routes_of(scope: Scope) -> list[Route]:
    """The routes of the path, whatever their methods."""
    routes = (route for router in ROUTERS for route in router.routes if isinstance(route, Route))
    return [route for route in routes if route.matches(scope)[0] is not Match.NONE]


def _without_slash(request: Request) -> str | None:
    """The address of the route that a path with a slash too many at its end means; None: it means none.

    It is relative to the request's own, so that it holds behind proxies, and names no host of the client's choice.
    """
    path: str = request.scope["path"]
    bare = path.rstrip("/")
    if bare == path or not _routes_of({**request.scope, "path": bare}):
        return None
    name = quote(bare.rpartition("/")[2])
    query = request.scope["query_string"].decode("latin-1")
    return "../" * (len(path) - len(bare)) + name + (f"?{query}" if query else "")


def _document(app: FastAPI, state: ServerState, bodies: BodyLimits) -> None:
    framework_document, settings = app.openapi, state.settings
    # Several models have defaults of their own, so the document shows those of the APIs.
    defaults = state.model_text.defaults.sampling if len(state.every) == 1 else {}

    @cache
    def document() -> dict[str, Any]:
        completed = openapi.complete(
            framework_document(),
            ROUTERS,
            needs_key=settings.needs_key,
            needs_admin_key=bool(settings.admin_keys),
            looks_at_hosts=checks_hosts(settings),
            limits=bodies,
        )
        show_model_defaults(completed["components"]["schemas"].values(), defaults)
        return completed

    app.openapi = document  # type: ignore[method-assign]  # the framework's documented way


def _guard(app: FastAPI, state: ServerState, bodies: BodyLimits, collectors: Collectors) -> None:
    settings, underway, on_reply = state.settings, Underway(), _on_reply(state, collectors)

    def tell(scope: Scope, reply: Reply) -> None:
        with story_of(scope):
            on_reply(reply)

    app.state.door = Door(
        settings,
        credentials=state.credentials,
        limits=state.limits,
        bodies=bodies,
        underway=underway,
        is_full=partial(_is_full, state),
        refusal=partial(_refusal, state),
        on_reply=tell,
    )
    app.add_middleware(HeadAsGet)  # the innermost: outside of it the method is the client's
    # Then this: keys and hosts are checked first.
    app.add_middleware(
        RefuseWhenFull, refusal=partial(_refusal, state), underway=underway, root_path=settings.root_path
    )
    for layer in layers(
        settings,
        bodies,
        state.metrics.body_bytes,
        credentials=state.credentials,
        limits=state.limits,
        on_reply=on_reply,
        requests=app.state.requests,
        explain=None if state.replicas is None else partial(_routes_in_words, state, state.replicas),
    ):
        app.add_middleware(layer)
    app.add_middleware(StoryTeller)


def _refusal(state: ServerState, *underway: int) -> QueueFull | None:
    """The refusal of a request before its body is read; with several models only where none has a place for it."""
    return state.client.refusal(*underway) if _is_full(state, *underway) else None


def _is_full(state: ServerState, *underway: int) -> bool:
    """Whether no request has a place, whatever is in its body."""
    full = state.client.is_full if state.catalog is None else state.catalog.is_full
    return not state.draining and full(*underway)


def _routes_in_words(state: ServerState, replicas: ReplicaSet, request_id: str) -> str:
    """Return where each prompt of a client's request was sent, in one line for a header."""
    routes = [replicas.routes(each) for each in state.names.find(request_id)[:_MOST_ROUTES]]
    return "; ".join(str(taken[-1]) for taken in routes if taken)


def _on_reply(state: ServerState, collectors: Collectors) -> Callable[[Reply], None]:
    settings, metrics, model = state.settings, state.metrics, state.model_names[0]

    def on_reply(reply: Reply) -> None:
        method = reply.method if reply.method in METHODS else "other"
        metrics.http_request(reply.route or "none", method, reply.status, reply.seconds)
        if reply.path.removeprefix(settings.root_path) in PUBLIC_PATHS:
            return
        log_order(reply, settings.root_path)
        story = CURRENT.get() or RequestStory()
        summaries = story.summaries()
        if not settings.disable_access_log:
            log_reply(reply, totals(summaries), story.model or model)
        for each in collectors:
            each.tell(reply, story.carrier, summaries)

    return on_reply
