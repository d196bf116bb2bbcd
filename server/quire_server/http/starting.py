"""The application while the model is loaded: probes report the progress, all other requests get a 503.

Of a page a browser gets one that says so and opens it by itself later.

It has no heavy imports, so that the port listens before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.errors import NotReady, error_body
from quire_server.http.access import layers
from quire_server.http.body_limits import LARGEST_BODY, BodyLimits
from quire_server.http.credentials import Credentials
from quire_server.http.door import Door
from quire_server.http.envelopes import error_reply
from quire_server.http.guard import PUBLIC_PATHS, Reply
from quire_server.http.overload import OpenRequests
from quire_server.settings import ServerLimits, Settings

if TYPE_CHECKING:
    from fastapi import FastAPI


LOADING = "loading"
_READY_PATHS = frozenset({"/health", "/health/ready", "/ping"})
_PAGES = frozenset({"/", "/docs", "/dashboard", "/learn"})
_PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Quire is starting</title></head>'
    "<body><h1>Quire is starting</h1><p>{}</p><p>This page opens by itself.</p></body></html>"
)
_SOON = 2.0  # seconds to wait where nothing is known


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """The progress of the start, as the engine reports it."""

    phase: str
    done: int
    total: int  # 0: not known
    unit: str
    elapsed_seconds: float

    @property
    def ratio(self) -> float | None:
        """The progress of this phase, 0 to 1; None where it is not known."""
        return min(1.0, self.done / self.total) if self.total > 0 else None

    @property
    def remaining_seconds(self) -> float:
        """An estimate for Retry-After, at the rate so far."""
        return self.elapsed_seconds * (1 - self.ratio) / self.ratio if self.ratio else _SOON

    def __str__(self) -> str:
        share = "" if self.ratio is None else f", {100 * self.ratio:.0f} %"
        return f"{self.phase}{share}, for {self.elapsed_seconds:.0f} s"


class Starting:
    """The application until the model is loaded; `progress` and `metrics` are called for each reply."""

    def __init__(
        self, progress: Callable[[], StartProgress], metrics: Callable[[], tuple[bytes, str]], root_path: str = ""
    ) -> None:
        self._progress = progress
        self._metrics = metrics  # the exposition and its media type
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._reply(scope)(scope, receive, send)

    def _reply(self, scope: Scope) -> Response:
        path = scope["path"].removeprefix(self._root_path)
        if scope["method"] in {"GET", "HEAD"}:
            if path == "/health/live":
                return JSONResponse({"status": "live"})
            if path == "/metrics":
                body, media_type = self._metrics()
                return Response(body, media_type=media_type)
        progress = self._progress()
        error = NotReady(
            f"The model is being loaded: {progress}.", retry_after_seconds=progress.remaining_seconds, code=LOADING
        )
        if path in _PAGES and "text/html" in Headers(scope=scope).get("accept", ""):
            return _waiting_page(error)
        return _probed(error, progress) if path in _READY_PATHS else error_reply(error, scope)


def _waiting_page(error: NotReady) -> Response:
    """The reply to a browser, which asks again in a moment."""
    headers = {"refresh": f"{_SOON:g}", "cache-control": "no-store", "content-security-policy": "default-src 'none'"}
    return HTMLResponse(_PAGE.format(escape(error.message)), error.status, {**error.headers, **headers})


def _probed(error: NotReady, progress: StartProgress) -> Response:
    """The reply to a probe, with the progress in numbers."""
    figures = {
        "phase": progress.phase,
        "done": progress.done,
        "total": progress.total,
        "unit": progress.unit,
        "percent": None if progress.ratio is None else round(100 * progress.ratio, 1),
        "elapsed_seconds": round(progress.elapsed_seconds, 1),
    }
    return JSONResponse({**error_body(error), "progress": figures}, error.status, error.headers)


def starting_app(
    settings: Settings,
    progress: Callable[[], StartProgress],
    metrics: Callable[[], tuple[bytes, str]],
    on_reply: Callable[[Reply], None],
    credentials: Credentials,
) -> ASGIApp:
    """The starting application with its layers; `on_reply` is called for each reply except those to probes."""
    app: ASGIApp = Starting(progress, metrics, settings.root_path)

    def tell(reply: Reply) -> None:
        if reply.path.removeprefix(settings.root_path) not in PUBLIC_PATHS:
            on_reply(reply)

    # The context length is not known yet, and no body is read.
    bodies = BodyLimits(max_body_bytes=settings.max_body_bytes or LARGEST_BODY, max_model_len=1)
    around = layers(
        settings, bodies, credentials=credentials, limits=ServerLimits(), on_reply=tell, requests=OpenRequests()
    )
    for layer in around:
        app = layer(app)
    return app


class AppSwitch:
    """The listener's application: passes requests to the starting application first and to the serving one later.

    One application serves the whole of a request. Connections stay open over the switch. The serving application's
    lifespan ends with the listener.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._num_connections = 0
        self._on_connections: Callable[[int], None] = lambda _: None
        self._app = app
        self._serving = AsyncExitStack()
        self.door: Door | None = None  # of the serving application

    async def open(self, app: FastAPI, around: ASGIApp | None = None) -> None:
        """Start the application's lifespan and send all further requests to it, or to what is `around` it."""
        await self._serving.enter_async_context(app.router.lifespan_context(app))
        self._app = app if around is None else around
        self.door = app.state.door

    async def close(self) -> None:
        """End the serving application's lifespan."""
        await self._serving.aclose()

    def tell_connections(self, number: int) -> None:
        """The listener's number of open connections has changed."""
        self._num_connections = number
        self._on_connections(number)

    def watch_connections(self, on_connections: Callable[[int], None]) -> None:
        """Call `on_connections` with the number of connections, now and at each change."""
        self._on_connections = on_connections
        on_connections(self._num_connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})
